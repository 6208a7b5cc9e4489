"""A model with a scalar head: values and gradients that do not depend on how a batch is cut or shared out.

In float64 the gradient of every parameter agrees to 1e-10 with that of one plain rank which takes the whole batch as
one row, for a critic's loss (values before tokens) and for a reward model's (values after the last tokens of pairs).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_ranks import Ranks, made_batch, opened, ranks_of, whole_weights
from forge.config import DistributedConfig, ModelConfig, TrainerConfig, TrainingConfig
from forge.errors import DataError, ModelError
from forge.losses import AnyLoss, BradleyTerry, CriticLoss
from forge.types import Batch, Sample
from gradient_cases import Options, Outcome, check_equal, outcomes_on, run_on_rank, split_options, still_trainer

VOCAB = 64
MODEL: dict[str, Any] = {
    "head": "scalar",
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "vocab_size": VOCAB,
    "max_seq_len": 2048,
    "rope_theta": 100.0,
    "norm_eps": 1e-6,
    "tie_embeddings": True,  # of the language model that it comes from: a scalar head is never tied
    "intermediate_size": 24,
}


LOSSES: dict[str, AnyLoss] = {
    "critic": CriticLoss(clip=0.2),
    "reward": BradleyTerry(centering_coefficient=0.1, has_margins=True),
}


def batch_of(loss: str) -> Batch:
    if loss == "critic":
        return made_batch(
            (9, 1, 15, 4, 2, 11, 16, 1, 3, 7), vocab=VOCAB, fields=("returns", "old_values"), seed=11, weightless=(3,)
        )
    maker = torch.Generator().manual_seed(7)
    samples = []
    for pair, (prompt, *completions) in enumerate([(5, 4, 9), (3, 12, 1), (1, 6, 7), (8, 2, 5), (2, 3, 3)]):
        prefix = torch.randint(VOCAB, (prompt,), generator=maker)
        margin = float(torch.rand((), generator=maker))
        for chosen, length in zip((1.0, 0.0), completions, strict=True):
            tokens = torch.cat([prefix, torch.randint(VOCAB, (length,), generator=maker)])
            weights = torch.zeros(len(tokens))
            weights[-1] = 1.0
            fields = {"chosen": torch.full_like(weights, chosen), "margin": torch.full_like(weights, margin)}
            samples.append(Sample(tokens, weights, fields, f"pair {pair}", sequence=pair))
    return Batch.of(samples)


@dataclass(frozen=True)
class Case:
    """One way to compute the gradients of a loss. What it says nothing about is as in the plain way."""

    loss: str = "critic"
    training: Options = ()
    distributed: Options = ()

    def __str__(self) -> str:
        return ", ".join([self.loss, *(f"{name}={value}" for name, value in self.training + self.distributed)])


def cases(**options: Any) -> list[Case]:
    return [Case(loss, *split_options(options)) for loss in LOSSES]


ON_ONE = [
    *cases(microbatch_tokens=32),
    *cases(microbatch_tokens=16),  # pairs longer than that are split: two passes
    *cases(microbatch_tokens=32, share_prefixes=True),
    *cases(microbatch_tokens=32, activation_checkpointing="full"),
]
ON_TWO = [
    *cases(microbatch_tokens=32, strategy="fsdp"),
    *cases(microbatch_tokens=16, strategy="replicate", share_prefixes=True),
    *cases(microbatch_tokens=32, tensor=2),
    *cases(microbatch_tokens=32, tensor=2, sequence_parallel=False),
    *cases(microbatch_tokens=32, pipeline=2),
]
PLAIN = [Case(loss) for loss in LOSSES]


# The ranks' side.


def config_of(one: Case) -> TrainerConfig:
    return still_trainer(ModelConfig(family="qwen3", **MODEL), one.training, one.distributed)


def run_cases(cases: list[Case]) -> list[Outcome]:
    return run_on_rank(
        cases,
        config_of=config_of,
        batch_of=lambda one: batch_of(one.loss),
        loss_of=lambda one: LOSSES[one.loss],
    )


def values_on(layouts: list[dict[str, Any]]) -> list[list[torch.Tensor]]:
    """The values of the critic's batch under each layout."""
    found = []
    for layout in layouts:
        training = TrainingConfig(max_seq_len=16, microbatch_tokens=32, schedule="constant")
        distributed = DistributedConfig(precision="float64", **layout)
        model = ModelConfig(family="qwen3", **MODEL)
        config = TrainerConfig(model=model, training=training, distributed=distributed, seed=5, frozen=True)
        with opened(config) as engine:
            found.append(engine.forward_values(batch_of("critic")))
    return found


def exported_and_resumed(root: Path, start: str) -> dict[str, Any]:
    """Start from a folder, save, step, export; in a second engine load what was saved, and take the same step."""
    from forge.trainer.checkpointer import Checkpointer

    batch, found = batch_of("reward"), {}
    config = TrainerConfig(
        model=ModelConfig(path=start, head="scalar"),
        training=TrainingConfig(max_seq_len=32, schedule="constant", learning_rate=1e-2),
        distributed=DistributedConfig(with_gpus=False),
        checkpoint_dir=root / "checkpoints",
        seed=5,
    )
    with opened(config, LOSSES["reward"]) as engine:
        found["head"] = whole_weights(engine)["lm_head.weight"]
        checkpointer = Checkpointer(engine)
        engine.train_step(batch)
        checkpointer.save()
        engine.train_step(batch)
        found["after"] = whole_weights(engine)
        found["values"] = engine.forward_values(batch)
        checkpointer.export(root / "hf")
        checkpointer.close()
    with opened(config, LOSSES["reward"]) as engine:
        checkpointer = Checkpointer(engine)
        checkpointer.load("must")
        engine.train_step(batch)
        found["resumed"] = whole_weights(engine)
        checkpointer.close()
    return found


def values_of_folder(folder: str) -> list[torch.Tensor]:
    """The values that a frozen engine gives the reward model's batch."""
    config = TrainerConfig(
        model=ModelConfig(path=folder, head="scalar"),
        training=TrainingConfig(max_seq_len=32, share_prefixes=True),
        distributed=DistributedConfig(with_gpus=False),
        frozen=True,
    )
    with opened(config) as engine:
        with pytest.raises(ModelError, match="logits of a language model"):
            engine.forward_logprobs(batch_of("reward"))
        return engine.forward_values(batch_of("reward"))


def refusals(folder: str) -> dict[str, str]:
    """What is said of engines that cannot be."""
    training, distributed = TrainingConfig(max_seq_len=32, schedule="constant"), DistributedConfig(with_gpus=False)
    configs = {
        "language model as a reward model": (ModelConfig(path=folder, head="scalar"), True, None),
        "scalar head without its loss": (ModelConfig(path=folder, head="scalar"), False, None),
        "loss without a scalar head": (ModelConfig(path=folder), False, LOSSES["reward"]),
    }
    found = {}
    for name, (model, frozen, loss) in configs.items():
        config = TrainerConfig(model=model, training=training, distributed=distributed, frozen=frozen)
        with pytest.raises(ModelError) as caught, opened(config, loss):
            pass
        found[name] = str(caught.value)
    return found


# The tests' side.


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    yield from ranks_of(__name__)


plain = outcomes_on(1, run_cases, PLAIN)
on_one = outcomes_on(1, run_cases, ON_ONE)
on_two = outcomes_on(2, run_cases, ON_TWO)


@pytest.mark.parametrize("one", ON_ONE, ids=str)
def test_on_one_rank(one: Case, on_one: dict[Case, Outcome], plain: dict[Case, Outcome]) -> None:
    check_equal(on_one[one], plain[Case(one.loss)])


@pytest.mark.parametrize("one", ON_TWO, ids=str)
def test_on_two_ranks(one: Case, on_two: dict[Case, Outcome], plain: dict[Case, Outcome]) -> None:
    check_equal(on_two[one], plain[Case(one.loss)])


def test_values_do_not_depend_on_the_layout(ranks: Ranks, tmp_path: Path) -> None:
    (expected,), *_ = ranks.run(values_on, 1, scratch=tmp_path / "one", layouts=[{}])
    layouts = [{"strategy": "fsdp"}, {"tensor": 2}, {"pipeline": 2}]
    found, _ = ranks.run(values_on, 2, scratch=tmp_path / "two", layouts=layouts)
    assert [len(values) for values in expected] == list(batch_of("critic").lengths)
    for of_layout in found:
        torch.testing.assert_close(of_layout, expected, rtol=0, atol=1e-6)  # scores are float32
    assert len({round(float(value), 6) for values in expected for value in values}) > 50


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "head_dim": 4, "vocab_size": VOCAB, "tie_word_embeddings": True}
    folder = tmp_path_factory.mktemp("models") / "language"
    Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).save_pretrained(folder)
    return folder


def hf_rewards(folder: Path, batch: Batch) -> list[float]:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        return [float(model(input_ids=sample.token_ids[None]).logits) for sample in batch.samples()]


def test_export_is_a_hugging_face_classifier(ranks: Ranks, tmp_path: Path, language_model: Path) -> None:
    """It starts from a language model, resumes exactly, and transformers computes the rewards that the engine does."""
    (found,) = ranks.run(exported_and_resumed, 1, scratch=tmp_path / "a", root=tmp_path, start=str(language_model))
    for name, weight in found["after"].items():
        assert torch.equal(found["resumed"][name], weight), name
    assert found["head"].shape == (1, 16)
    assert 0.01 < float(found["head"].std()) < 0.03

    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    assert config["id2label"] == {"0": "LABEL_0"}
    rewards = hf_rewards(tmp_path / "hf", batch_of("reward"))
    ours = [float(values[-1]) for values in found["values"]]
    assert ours == pytest.approx(rewards, abs=1e-5)
    assert len({round(reward, 3) for reward in rewards}) > 5

    (again,) = ranks.run(values_of_folder, 1, scratch=tmp_path / "b", folder=str(tmp_path / "hf"))
    torch.testing.assert_close(again, found["values"], rtol=0, atol=1e-5)


def test_new_head_is_the_same_on_every_layout(ranks: Ranks, tmp_path: Path, language_model: Path) -> None:
    start = str(language_model)
    (one,) = ranks.run(exported_and_resumed, 1, scratch=tmp_path / "a", root=tmp_path / "one", start=start)
    two = ranks.run(exported_and_resumed, 2, scratch=tmp_path / "b", root=tmp_path / "two", start=start)
    assert torch.equal(two[0]["head"], one["head"])
    assert torch.equal(two[1]["head"], one["head"])


def test_what_does_not_fit_together_is_refused(ranks: Ranks, tmp_path: Path, language_model: Path) -> None:
    (said,) = ranks.run(refusals, 1, scratch=tmp_path, folder=str(language_model))
    assert "score.weight" in said["language model as a reward model"]
    assert "logits of a language model" in said["scalar head without its loss"]
    assert "values of a scalar head" in said["loss without a scalar head"]


@pytest.mark.parametrize("broken", ["alone", "two chosen", "heavy"])
def test_samples_that_are_not_pairs_are_refused(broken: str) -> None:
    samples = list(batch_of("reward").samples())
    if broken == "alone":
        samples = samples[:-1]
    elif broken == "two chosen":
        fields = {**samples[1].fields, "chosen": torch.ones(len(samples[1]))}
        samples[1] = replace(samples[1], fields=fields)
    else:
        samples[1] = replace(samples[1], loss_weights=samples[1].loss_weights * 2)
    with pytest.raises(DataError, match="not a pair"):
        BradleyTerry().normalizer(Batch.of(samples))
