"""Models that transformers wrote: packed rows through our engine, against transformers on the separate documents.

Every family, on one rank and on every layout that two CPU ranks can have: logits and logprobs, the loss and the norm of
the gradient, and the weights after one step of AdamW, as a folder that transformers loads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from engine_ranks import Ranks, made_batch, opened, ranks_of
from forge.config import DistributedConfig, ModelConfig, TrainerConfig, TrainingConfig
from forge.errors import LayoutError
from forge.types import Batch, Evaluated, StepResult

VOCAB = 96
LENGTHS = (9, 1, 14, 5, 2, 11, 7)
LOGIT_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 2e-6
"""A step moves weights by up to 1e-2, so this is 1 part in 5000 of a step. AdamW divides by the gradient's size plus
1e-3, which multiplies what float32 rounds off in a gradient (about 1e-9 to 1e-8) by at most lr / 1e-3 = 10."""
TRAINING: dict[str, Any] = {
    "max_seq_len": 16,
    "microbatch_tokens": 26,
    "head_chunk_tokens": 5,
    "learning_rate": 1e-2,
    "schedule": "constant",
    "warmup_steps": 0,
    "weight_decay": 0.1,
    "beta1": 0.8,
    "beta2": 0.9,
    "adam_eps": 1e-3,
    "max_grad_norm": 0.1,
}

SINGLE: dict[str, dict[str, Any]] = {"one": {}}
DATA = {"fsdp": {}, "replicate": {"strategy": "replicate"}}
TENSOR = {"tensor": {"tensor": 2}, "tensor, rows whole": {"tensor": 2, "sequence_parallel": False}}
PIPELINE: dict[str, dict[str, Any]] = {
    "1F1B": {"pipeline": 2},
    "GPipe": {"pipeline": 2, "pipeline_schedule": "GPipe"},
    "Interleaved1F1B": {"pipeline": 2, "pipeline_schedule": "Interleaved1F1B"},
}
EXPERT: dict[str, dict[str, Any]] = {
    "expert": {"expert": 2},
    "tensor and expert": {"tensor": 2, "expert": 2},
}
LAYOUTS = {
    "qwen3 tied": DATA | TENSOR,
    "qwen3": DATA | TENSOR | PIPELINE,
    "llama": DATA | TENSOR | PIPELINE,
    "llama stretched": DATA | TENSOR | {"1F1B": PIPELINE["1F1B"]},
    "qwen3 mixture": DATA | EXPERT | PIPELINE,
    "qwen2": DATA | TENSOR | {"1F1B": PIPELINE["1F1B"]},
    "qwen2 tied": {"fsdp": {}},
}
CASES = [(family, layout) for family, layouts in LAYOUTS.items() for layout in (SINGLE | layouts)]


def documents() -> Batch:
    return made_batch(LENGTHS, vocab=VOCAB, seed=3, weightless=(3,))


# The ranks' side.


@dataclass(frozen=True)
class Found:
    """What a rank saw: logits by sample, [L - 1, V], as far as they passed here."""

    logits: dict[int, Tensor]
    logprobs: list[Tensor]
    result: StepResult
    evaluated: Evaluated


def listening(engine: Any, batch: Batch, logits: dict[int, Tensor]) -> None:
    """Let the head, besides what it computes, write down the logits of every sample that passes."""
    samples = {tuple(sample.token_ids[1:].tolist()): index for index, sample in enumerate(batch.samples())}

    def tell(hidden: Tensor, weight: Tensor, row: Any, group: Any) -> Any:
        mine = F.linear(hidden, weight).detach()
        if group is not None:
            parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, mine, group=group)
            mine = torch.cat(parts, dim=-1)
        counts = [length - 1 for length in row.documents.lengths]
        for of_sample, targets in zip(mine.split(counts), row.targets.split(counts), strict=True):
            logits[samples[tuple(targets.tolist())]] = of_sample
        return inner(hidden, weight, row, group)

    for part in engine.parts:
        if part.lm_head is not None:
            inner = part.lm_head.function
            part.use(engine.row_registry, tell)


def run_families(root: Path, layouts: dict[str, dict[str, dict[str, Any]]]) -> dict[str, dict[str, Found]]:
    """Every family on every one of its layouts, one engine after the other."""
    return {
        family: {layout: run_layout(root, family, layout, degrees) for layout, degrees in of_family.items()}
        for family, of_family in layouts.items()
    }


def run_layout(root: Path, family: str, layout: str, degrees: dict[str, Any]) -> Found:
    config = TrainerConfig(
        model=ModelConfig(path=str(root / "models" / family)),
        training=TrainingConfig(**TRAINING),
        distributed=DistributedConfig(with_gpus=False, **degrees),
    )
    with opened(config) as engine:
        return run_engine(engine, root / "out" / family / layout)


def run_engine(engine: Any, out: Path) -> Found:
    from forge.trainer.checkpointer import Checkpointer

    batch = documents()
    logits: dict[int, Tensor] = {}
    heads = [part.lm_head.function if part.lm_head is not None else None for part in engine.parts]
    listening(engine, batch, logits)
    logprobs = engine.forward_logprobs(batch)
    for part, head in zip(engine.parts, heads, strict=True):
        part.use(engine.row_registry, head)
    evaluated = engine.evaluate(batch)
    result = engine.train_step(batch)
    Checkpointer(engine).export(out)
    return Found(logits, logprobs, result, evaluated)


# The tests' side.


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    yield from ranks_of(__name__)


def transformers_model(family: str) -> nn.Module:
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    facts: dict[str, Any] = {
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "tie_word_embeddings": family.endswith(" tied"),
        "initializer_range": 0.2,
    }
    torch.manual_seed(7)
    if family == "qwen3 mixture":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**experts, **facts))
    if family.startswith("qwen3"):
        return Qwen3ForCausalLM(Qwen3Config(intermediate_size=48, **facts))
    if family.startswith("qwen2"):
        model = Qwen2ForCausalLM(Qwen2Config(intermediate_size=48, **facts))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(".bias"):  # zero in a new model
                    parameter.normal_(std=0.2)
        return model
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 500.0}
    if family == "llama stretched":
        rope |= {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    return LlamaForCausalLM(LlamaConfig(intermediate_size=48, rope_parameters=rope, **facts))


@dataclass
class Oracle:
    """What transformers and torch alone make of the documents."""

    logits: list[Tensor]
    logprobs: list[Tensor]
    loss: float
    grad_norm: float
    stepped: dict[str, Tensor]


def ask(model: nn.Module) -> Oracle:
    batch = documents()
    logits, logprobs, total = [], [], torch.zeros(())
    for sample in batch.samples():
        of_sample = model(input_ids=sample.token_ids[None], use_cache=False).logits[0]
        scores = F.log_softmax(of_sample[:-1], dim=-1).gather(1, sample.token_ids[1:, None])[:, 0]
        total = total - (sample.loss_weights[1:] * scores).sum() / batch.total_weight
        logits.append(of_sample[:-1].detach())
        logprobs.append(torch.cat([torch.zeros(1), scores.detach()]))
    total.backward()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    norm = nn.utils.clip_grad_norm_(model.parameters(), TRAINING["max_grad_norm"])
    groups = [{"params": matrices, "weight_decay": TRAINING["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}]
    betas = (TRAINING["beta1"], TRAINING["beta2"])
    torch.optim.AdamW(groups, lr=TRAINING["learning_rate"], betas=betas, eps=TRAINING["adam_eps"]).step()
    return Oracle(logits, logprobs, float(total.detach()), float(norm), dict(model.state_dict()))


@dataclass
class Family:
    oracle: Oracle
    found: dict[str, list[Found]]
    out: Path


@pytest.fixture(scope="module")
def families(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("parity")
    made = {}
    for name in LAYOUTS:
        model = transformers_model(name)
        model.save_pretrained(root / "models" / name)
        made[name] = Family(ask(model), {}, root / "out" / name)
    for num_ranks, layouts in ((1, dict.fromkeys(LAYOUTS, SINGLE)), (2, LAYOUTS)):
        answers = ranks.run(run_families, num_ranks, scratch=root / f"ranks{num_ranks}", root=root, layouts=layouts)
        for name, family in made.items():
            family.found |= {layout: [answer[name][layout] for answer in answers] for layout in layouts[name]}
    return made


@pytest.fixture
def family(request: Any, families: dict[str, Family]) -> Family:
    return families[request.param]


@pytest.mark.parametrize(("family", "layout"), CASES, indirect=["family"])
def test_logits_of_packed_rows_are_those_of_separate_documents(family: Family, layout: str) -> None:
    seen: dict[int, Tensor] = {}
    for of_rank in family.found[layout]:
        seen |= of_rank.logits
    with_targets = [index for index, length in enumerate(LENGTHS) if length > 1]
    assert sorted(index for index in seen if LENGTHS[index] > 1) == with_targets
    for index in with_targets:
        assert (seen[index] - family.oracle.logits[index]).abs().max() <= LOGIT_TOLERANCE, index


@pytest.mark.parametrize(("family", "layout"), CASES, indirect=["family"])
def test_logprobs_are_the_same_on_every_rank(family: Family, layout: str) -> None:
    for of_rank in family.found[layout]:
        assert [scores.shape for scores in of_rank.logprobs] == [(length,) for length in LENGTHS]
        for scores, expected in zip(of_rank.logprobs, family.oracle.logprobs, strict=True):
            assert scores.dtype == torch.float32
            assert scores[0] == 0
            assert (scores - expected).abs().max() <= LOGIT_TOLERANCE


@pytest.mark.parametrize(("family", "layout"), CASES, indirect=["family"])
def test_a_step_has_the_loss_and_the_norm_of_a_plain_one(family: Family, layout: str) -> None:
    batch, oracle = documents(), family.oracle
    first = family.found[layout][0].result
    for of_rank in family.found[layout]:
        result = of_rank.result
        assert replace(result, seconds=0.0) == replace(first, seconds=0.0)
        assert result.loss == pytest.approx(oracle.loss, rel=2e-6)
        assert result.grad_norm == pytest.approx(oracle.grad_norm, rel=1e-5)
        assert result.grad_norm > 2 * TRAINING["max_grad_norm"], "clipping must have something to do"
        assert (result.step, result.learning_rate, result.skipped) == (1, TRAINING["learning_rate"], False)
        assert result.num_tokens == sum(LENGTHS)
        assert result.num_loss_tokens == int((batch.loss_weights != 0).sum())
        total, normalizer, _ = of_rank.evaluated
        assert normalizer == pytest.approx(batch.total_weight)
        assert total / normalizer == pytest.approx(oracle.loss, rel=2e-6)


@pytest.mark.parametrize(("family", "layout"), CASES, indirect=["family"])
def test_the_folder_after_a_step_is_the_model_that_plain_adamw_gives(family: Family, layout: str) -> None:
    from transformers import AutoModelForCausalLM

    again = AutoModelForCausalLM.from_pretrained(family.out / layout, dtype="auto").state_dict()
    assert again.keys() == family.oracle.stepped.keys()
    for name, expected in family.oracle.stepped.items():
        assert again[name].dtype == torch.float32
        assert (again[name] - expected).abs().max() <= WEIGHT_TOLERANCE, name


def refuse(root: Path) -> str:
    degrees = {"tensor": 2, "expert": 2, "sequence_parallel": False}
    with pytest.raises(LayoutError) as error:
        run_layout(root, "qwen3 mixture", "refused", degrees)
    return str(error.value.path)


def test_experts_among_tensor_ranks_need_rows_that_are_split(
    families: dict[str, Family], ranks: Ranks, tmp_path: Path
) -> None:
    """TorchTitan has no such layout, and says so in the middle of the first row."""
    root = families["qwen3 mixture"].out.parent.parent
    assert ranks.run(refuse, 2, scratch=tmp_path, root=root) == ["distributed.sequence_parallel"] * 2
