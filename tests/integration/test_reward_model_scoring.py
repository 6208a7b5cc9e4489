"""The classifier that a run exports, and what scores completions with it: the scores are those of `transformers`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import grpo_runs
from forge.config import RewardModelConfig, load
from forge.errors import DataError, ModelError
from forge.loops import reward_models
from forge.loops.reward_model import RewardModelResult
from forge.loops.reward_models import chosen_engine, reward_model_errors
from forge.models.tiny import make_tiny
from forge.rollout.reward_model import RewardModel, TransformersScorer, read_folder
from forge.trainer.scoring import EngineScorer
from reward_model_runs import config, conversation, hf_rewards, one_torch_thread, pairs, train, write_pairs


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("reward_model"))


@pytest.fixture(scope="module")
def trained(home: Path) -> Iterator[RewardModelResult]:
    with one_torch_thread():
        yield train(config(home / "runs"))


def test_transformers_scores_padded_batches_of_the_export(home: Path, trained: RewardModelResult) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    assert trained.export is not None
    records = list(pairs(6, offset=150))
    conversations = [conversation(record, side) for record in records for side in ("chosen", "rejected")]
    tokenizer: Any = AutoTokenizer.from_pretrained(trained.export)
    model = AutoModelForSequenceClassification.from_pretrained(trained.export, dtype=torch.float32).eval()
    texts = [tokenizer.apply_chat_template(each, tokenize=False) for each in conversations]
    batch = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
    assert len({int(each) for each in batch["attention_mask"].sum(-1)}) > 1
    with torch.no_grad():
        padded = model(**batch).logits[:, 0].tolist()
    assert padded == pytest.approx(hf_rewards(trained.export, conversations), abs=1e-4)


def scored(scorer: Any, folder: Path, conversations: list[Any], **options: Any) -> list[Any]:
    """What the worker's endpoint answers, in this process."""
    model = RewardModel(RewardModelConfig(path=str(folder), **options), scorer)
    model.setup()
    return model.score(conversations)


def test_what_was_trained_is_scored_alike_by_every_engine(trained: RewardModelResult) -> None:
    assert trained.export is not None
    records = list(pairs(12, offset=200))
    asked: list[Any] = [conversation(record, side) for record in records for side in ("chosen", "rejected")]
    asked += [*(asked[0],) * 3, "plain text", "It is red.", "a"]
    expected = hf_rewards(trained.export, asked)
    native = RewardModel(RewardModelConfig(path=str(trained.export), max_seq_len=80), reward_models._native)
    native.setup()
    assert native.score(asked) == pytest.approx(expected, abs=1e-4)
    too_long = native.score(["word " * 200, asked[0]])
    assert isinstance(too_long[0], DataError)
    assert too_long[1] == pytest.approx(expected[0], abs=1e-4)
    assert isinstance(native._scorer, EngineScorer)
    native._scorer.close()
    assert scored(TransformersScorer, trained.export, asked) == pytest.approx(expected, abs=1e-4)
    assert chosen_engine(RewardModelConfig(path=str(trained.export))) == "native"


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_classifiers_of_each_family_have_the_scores_of_transformers(
    family: str, tmp_path: Path, trained: RewardModelResult
) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    make_tiny(tmp_path / "base", family=family, num_layers=2)
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
    torch.nn.init.normal_(model.score.weight, std=3.0)
    model.save_pretrained(tmp_path / "hf")
    AutoTokenizer.from_pretrained(tmp_path / "base").save_pretrained(tmp_path / "hf")
    asked: list[Any] = [conversation(record, "chosen") for record in pairs(5)]
    native = RewardModel(RewardModelConfig(path=str(tmp_path / "hf")), reward_models._native)
    native.setup()
    found = native.score(asked)
    native._scorer.close()  # type: ignore[attr-defined]
    assert found == pytest.approx(hf_rewards(tmp_path / "hf", asked), abs=1e-4)
    assert len({round(float(score), 3) for score in found if isinstance(score, float)}) == 5


def test_the_tokens_of_training_are_those_of_scoring(home: Path, trained: RewardModelResult) -> None:
    from forge.data.files import Record
    from forge.data.formats import Layout
    from forge.data.reward_pairs import RewardPairEncoder
    from forge.data.samples import Counters

    assert trained.export is not None
    folder = read_folder(RewardModelConfig(path=str(trained.export)))
    data = config(home / "unused").data
    encoder = RewardPairEncoder(folder.tokenizer, data=data, max_seq_len=128, margin=True)
    record = next(pairs(1))
    texts = {"chosen": record["prompt"] + record["chosen"], "rejected": record["prompt"] + record["rejected"]}
    seen: list[list[int]] = []
    scorer = RewardModel(RewardModelConfig(path=str(trained.export)), lambda _: lambda rows: seen.extend(rows) or [0.0])
    scorer.setup()
    for value, layout in ((record, "preference"), (texts, "preference_text")):
        place = Record("file:1", json.dumps(value).encode())
        samples = encoder.encode_all(place, layout=Layout(layout, {}), counters=Counters())
        for sample, side in zip(samples, ("chosen", "rejected"), strict=True):
            scorer.score([conversation(record, side) if layout == "preference" else texts[side]])
            assert sample.token_ids.tolist() == seen[-1]
            assert sample.loss_weights.tolist() == [0.0] * (len(sample) - 1) + [1.0]
            assert set(sample.fields) == {"chosen", "margin"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, trained: RewardModelResult) -> dict[str, Path]:
    """Folders that are not reward models, each for another reason."""
    import shutil

    assert trained.export is not None
    root = tmp_path_factory.mktemp("folders")
    make_tiny(root / "language model", num_layers=1)
    for name in ("three labels", "small vocabulary", "no tokenizer", "no template"):
        shutil.copytree(trained.export, root / name)
    for name, changes in {
        "three labels": {"id2label": {"0": "a", "1": "b", "2": "c"}},
        "small vocabulary": {"vocab_size": 100},
    }.items():
        file = root / name / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    for file in [*(root / "no tokenizer").glob("tokenizer*"), root / "no template" / "chat_template.jinja"]:
        file.unlink()
    return {path.name: path for path in root.iterdir()}


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("language model", "a model for sequence classification with one label"),
        ("three labels", "a model for sequence classification with one label"),
        ("small vocabulary", "the model has 100 tokens"),
        ("no tokenizer", "a folder with at least one of"),
    ],
)
def test_a_folder_that_is_not_a_reward_model_is_refused(folders: dict[str, Path], name: str, rule: str) -> None:
    (error,) = reward_model_errors(RewardModelConfig(path=str(folders[name])))
    assert isinstance(error, ModelError)
    assert error.path == "rewards.reward_model.path"
    assert str(error.rule).startswith(rule)
    assert error.repair


def test_prompts_of_messages_need_the_reward_models_template(folders: dict[str, Path], tmp_path: Path) -> None:
    from forge.config import GRPOConfig
    from forge.loops.preflight import check_grpo

    base = [
        *("model.preset=tiny", "prompts.sources=[{task: arithmetic, num_prompts: 8}]", f"run.output_dir={tmp_path}"),
        *("rewards.functions=[{kind: reward_model}]", f"rewards.reward_model.path={folders['no template']}"),
    ]
    with pytest.raises(ModelError, match="no chat template") as caught:
        check_grpo(load(GRPOConfig, overrides=base))
    assert caught.value.path == "rewards.reward_model.path"
    template = folders["language model"] / "chat_template.jinja"
    check_grpo(load(GRPOConfig, overrides=[*base, f"rewards.reward_model.chat_template={template}"]))


def test_limits_of_a_reward_model(folders: dict[str, Path], trained: RewardModelResult) -> None:
    assert trained.export is not None
    path = str(trained.export)
    assert read_folder(RewardModelConfig(path=path)).max_seq_len == 2048
    assert read_folder(RewardModelConfig(path=path, microbatch_tokens=9000)).microbatch_tokens == 9000
    (error,) = reward_model_errors(RewardModelConfig(path=path, max_seq_len=5000))
    assert (error.path, error.value) == ("rewards.reward_model.max_seq_len", 5000)
    with pytest.raises(ValueError, match="at least max_seq_len"):
        RewardModelConfig(path=path, max_seq_len=100, microbatch_tokens=50)


@pytest.mark.parametrize("text", ["[]", "{", '{"architectures": null, "id2label": null}'])
def test_a_config_that_describes_no_classifier_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    (error,) = reward_model_errors(RewardModelConfig(path=str(tmp_path)))
    assert (error.path, error.message) == ("rewards.reward_model.path", "this is not a reward model")


# ---- The padding of an export ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "pad"),
    [
        ({}, "<|endoftext|>"),
        ({"pad_token": "<|im_end|>"}, "<|my_pad|>"),
        ({"pad_token": "<|im_end|>", "without": "<|my_pad|>"}, None),
        ({"named": 3}, "<|endoftext|>"),  # config.json names another token than the tokenizer pads with
    ],
)
def test_an_export_never_pads_with_a_token_that_ends_texts(
    tmp_path: Path, settings: dict[str, Any], pad: str | None
) -> None:
    from forge.models.classifier_files import classifier_content
    from forge.models.hf_config import write_json

    make_tiny(tmp_path, num_layers=1)
    tokens = json.loads((tmp_path / "tokenizer.json").read_text())
    tokens["added_tokens"].append(tokens["added_tokens"][-1] | {"content": "<|my_pad|>", "id": 600})
    tokens["added_tokens"] = [each for each in tokens["added_tokens"] if each["content"] != settings.get("without")]
    write_json(tmp_path / "tokenizer.json", tokens)
    ids = {each["content"]: each["id"] for each in tokens["added_tokens"]}
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    content = {"eos_token_id": [ids["<|im_end|>"]], "pad_token_id": settings.get("named")}
    found = classifier_content("Qwen3ForCausalLM", content, tmp_path, write=write_json)
    assert found["architectures"] == ["Qwen3ForSequenceClassification"]
    assert found["pad_token_id"] == (None if pad is None else ids[pad])
    if pad is not None:
        assert json.loads(file.read_text())["pad_token"] == pad


# ---- In reinforcement learning --------------------------------------------------------------------------------------


def test_grpo_with_a_reward_model_and_a_reference(
    tmp_path: Path, trained: RewardModelResult, leaves_nothing: None
) -> None:
    """The generator, the reward model and the reference are processes beside the trainer."""
    assert trained.export is not None
    chosen = grpo_runs.config(
        tmp_path / "rlhf",
        "rewards.functions=[{kind: reward_model, args: {mean: 0.5, std: 2.0}, timeout_s: 300}]",
        "rewards.on_error=stop",
        *(f"rewards.reward_model.path={trained.export}", "algorithm.kl.coefficient=0.1", "record.rollouts=all"),
        *("training.max_steps=2", "checkpointing.save_interval=null", "model.num_layers=1"),
    )
    grpo_runs.train(chosen)
    found = list(grpo_runs.episodes(chosen))
    assert len(found) == 12
    asked = [[*each["prompt"], {"role": "assistant", "content": each["text"]}] for each in found]
    expected = [(score - 0.5) / 2.0 for score in hf_rewards(trained.export, asked)]
    assert [each["reward"] for each in found] == pytest.approx(expected, abs=1e-4)
    assert grpo_runs.metrics(chosen, "train/kl")[1] > 0
