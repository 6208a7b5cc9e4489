"""Prompts from records: every kind of file, both layouts, and what is said of records that cannot be used."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from pydantic import ValidationError

from forge.config import EvaluationConfig, PromptsConfig, PromptSourceConfig
from forge.data.prompts import PromptDataset, open_prompts
from forge.errors import DataError
from forge.types import Task

NOTHING_HELD = EvaluationConfig()
ROWS = [{"question": f"How many are {n} and {n}?", "answer": f"{2 * n}", "tests": [n, f"{n}"]} for n in range(7)]


def written(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def dataset_of(path: Path, *, source: dict[str, Any] | None = None, **prompts: Any) -> PromptDataset:
    config = PromptsConfig(sources=(PromptSourceConfig(path=str(path), **(source or {})),), **prompts)
    return open_prompts(config, evaluation=NOTHING_HELD, seed=0).train


def everything(dataset: PromptDataset) -> list[Task]:
    return [dataset.read(index) for index in range(len(dataset))]


def write_kind(path: Path) -> None:
    if path.name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{**row, "tests": [1]} for row in ROWS]), path)
        return
    lines = path.name.startswith("lines")
    text = "".join(json.dumps(row) + "\n" for row in ROWS) if lines else json.dumps(ROWS, indent=1)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


@pytest.mark.parametrize("name", ["lines.jsonl", "array.json", "lines.jsonl.gz", "array.json.gz", "rows.parquet"])
def test_every_kind_of_file_gives_the_same_prompts(name: str, tmp_path: Path) -> None:
    write_kind(tmp_path / name)
    prompts = everything(dataset_of(tmp_path / name, chat=False))
    assert [(prompt.text, prompt.answer) for prompt in prompts] == [(row["question"], row["answer"]) for row in ROWS]
    assert len({prompt.id for prompt in prompts}) == len(ROWS)
    assert all(prompt.id.startswith(f"{tmp_path / name}:") for prompt in prompts)
    assert all("tests" in prompt.metadata for prompt in prompts)


def test_a_saved_dataset_and_one_of_its_splits(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list([{**row, "tests": [1]} for row in ROWS])
    datasets.DatasetDict({"exam": rows}).save_to_disk(str(tmp_path / "saved"))
    dataset = dataset_of(tmp_path / "saved", source={"split": "exam", "num_prompts": 3})
    assert [prompt.messages[-1]["content"] for prompt in everything(dataset)] == [row["question"] for row in ROWS[:3]]
    assert dataset.read(0).metadata == {"tests": [1]}
    with pytest.raises(DataError, match="no split") as caught:
        dataset_of(tmp_path / "saved", source={"split": "train"})
    assert caught.value.rule == "the split is one of exam"


def test_the_format_of_gsm8k_is_recognised_and_its_answer_taken(tmp_path: Path) -> None:
    rows = [
        {"question": "A?", "answer": "She has 9 * 2 = <<9*2=18>>18 dollars.\n#### 18"},
        {"question": "B?", "answer": "It is much. #### 1,234,567"},
        {"question": "C?", "answer": "#### is not it\n####   -1,000.50 "},
        {"question": "D?", "answer": "#### 1,2"},
    ]
    dataset = dataset_of(written(tmp_path / "train.jsonl", rows))
    assert [prompt.answer for prompt in everything(dataset)] == ["18", "1234567", "-1000.50", "1,2"]
    assert dataset.read(1).metadata == {"solution": rows[1]["answer"]}
    plain = dataset_of(tmp_path / "train.jsonl", source={"format": "plain"})
    assert plain.read(0).answer == rows[0]["answer"]


@pytest.mark.parametrize("answer", ["It is 18.", "#### ", None])
def test_a_record_of_gsm8k_without_an_answer_is_refused(tmp_path: Path, answer: str | None) -> None:
    path = written(tmp_path / "a.jsonl", [{"question": "A?", "answer": "#### 1"}, {"question": "B?", "answer": answer}])
    with pytest.raises(DataError) as caught:
        dataset_of(path)
    assert caught.value.path == f"{path}:2"
    assert "####" in str(caught.value.rule)
    assert caught.value.repair


def test_columns_may_have_other_names(tmp_path: Path) -> None:
    row = {"problem": "2 + 2", "solution": 4, "prompt": "not this", "level": 3, "empty": None}
    path = written(tmp_path / "a.jsonl", [row])
    prompt = dataset_of(path, source={"columns": {"prompt": "problem", "answer": "solution"}}, chat=False).read(0)
    assert (prompt.text, prompt.answer) == ("2 + 2", "4")
    assert prompt.metadata == {"prompt": "not this", "level": 3}


def test_conversations_keep_their_turns_and_their_own_system_message(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]},
    ]
    rows = [
        {"messages": turns, "answer": "4"},
        {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3?"}]},
        {"prompt": "5?", "system": "Be long."},
        {"prompt": "6?"},
    ]
    dataset = dataset_of(
        written(tmp_path / "a.jsonl", rows), system_prompt="Be good.", template="<{prompt}> {prompt} {x}"
    )
    said = [[(turn["role"], turn["content"]) for turn in prompt.messages] for prompt in everything(dataset)]
    assert said == [
        [("system", "Be good."), ("user", "Hello"), ("assistant", "Hi"), ("user", "<2 + 2?> 2 + 2? {x}")],
        [("system", "Be brief."), ("user", "<3?> 3? {x}")],
        [("system", "Be long."), ("user", "<5?> 5? {x}")],
        [("system", "Be good."), ("user", "<6?> 6? {x}")],
    ]
    assert [prompt.answer for prompt in everything(dataset)] == ["4", None, None, None]


def test_text_to_go_on_from_has_the_template_and_no_messages(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [{"prompt": "a {prompt} b"}])
    prompt = dataset_of(path, chat=False, template="Q: {prompt}\nA:").read(0)
    assert (prompt.text, prompt.messages) == ("Q: a {prompt} b\nA:", ())


BAD = {
    "no prompt": ({"promt": "x", "answer": "1"}, {}, "there is no prompt in this record"),
    "no such column": ({"prompt": "x"}, {"columns": {"prompt": "problem"}}, "there is no prompt in this record"),
    "no such answer": ({"prompt": "x"}, {"columns": {"answer": "solution"}}, "has no `solution`"),
    "empty": ({"prompt": " \n", "answer": "1"}, {}, "the prompt is empty"),
    "empty message": ({"messages": [{"role": "user", "content": " "}]}, {}, "the prompt is empty"),
    "no text": ({"prompt": 5}, {}, "neither text nor messages"),
    "no role": ({"messages": [{"role": "king", "content": "x"}]}, {}, "has no valid role"),
    "answered": ({"messages": [{"role": "assistant", "content": "x"}]}, {}, "no message to answer"),
    "odd answer": ({"prompt": "x", "answer": ["1", "2"]}, {}, "neither text nor a number"),
    "true": ({"prompt": "x", "answer": True}, {}, "neither text nor a number"),
    "array": (["x"], {}, "JSON array"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_record_that_cannot_be_used_is_named_by_file_and_line_or_skipped(name: str, tmp_path: Path) -> None:
    row, source, message = BAD[name]
    columns = source.get("columns", {})
    good = {columns.get("prompt", "prompt"): "good", columns.get("answer", "answer"): "1"}
    path = written(tmp_path / "a.jsonl", [good, row, good])
    with pytest.raises(DataError, match=message) as caught:
        dataset_of(path, source=source)
    assert caught.value.path == f"{path}:2"
    assert caught.value.rule
    assert caught.value.repair
    assert "data.on_bad_record" not in caught.value.repair
    dataset = dataset_of(path, source=source, on_bad_record="skip")
    assert [prompt.id for prompt in everything(dataset)] == [f"{path}:1", f"{path}:3"]
    assert dataset.num_skipped == 1


def test_what_a_record_has_instead_is_listed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="it has promt, answer") as caught:
        dataset_of(written(tmp_path / "a.jsonl", [{"promt": "x", "answer": "1"}]))
    assert caught.value.value == ["answer", "promt"]
    assert "`messages`, `prompt` and `question`" in str(caught.value.rule)
    assert "did you mean `prompt`?" in str(caught.value.repair)


def test_broken_json_is_named_by_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"\n')
    with pytest.raises(DataError, match="not JSON") as caught:
        dataset_of(path)
    assert caught.value.path == f"{path}:2"
    assert caught.value.repair == "correct or remove it, or set prompts.on_bad_record to skip"
    path.write_text('{"prompt": \n{"question": "b", "answer": "#### 2"}\n')
    assert dataset_of(path, on_bad_record="skip").read(0).answer == "2"


def test_a_source_without_one_good_record_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [{"x": 1}])
    with pytest.raises(DataError, match="no usable prompt") as caught:
        dataset_of(path, on_bad_record="skip")
    assert (caught.value.path, caught.value.value) == (str(path), 1)
    assert "on_bad_record" in str(caught.value.repair)


def test_a_conversation_is_refused_where_prompts_are_text(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "x"}]}])
    with pytest.raises(DataError, match="a conversation") as caught:
        dataset_of(path, chat=False)
    assert "prompts.chat" in str(caught.value.rule)


def test_a_broken_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 this is none")
    with pytest.raises(DataError, match="Parquet") as caught:
        dataset_of(path)
    assert caught.value.path == str(path)


def test_an_id_names_one_prompt(tmp_path: Path) -> None:
    rows = [{"prompt_id": "one", "prompt": "a"}, {"prompt_id": "one", "prompt": "a"}]
    assert [prompt.id for prompt in everything(dataset_of(written(tmp_path / "a.jsonl", rows)))] == ["one", "one"]
    with pytest.raises(DataError, match="same id 'one'") as caught:
        dataset_of(written(tmp_path / "a.jsonl", [*rows, {"prompt_id": "one", "prompt": "b"}]))
    assert "prompt_id" in str(caught.value.repair)


def test_a_file_that_changes_under_a_run_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}])
    dataset = dataset_of(path)
    written(path, [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "3"}])
    assert dataset.read(0).answer == "1"
    with pytest.raises(DataError, match="changed after the run started") as caught:
        dataset.read(1)
    assert caught.value.path == f"{path}:2"


@pytest.mark.parametrize(
    ("source", "key", "repair"),
    [
        ({"path": "a.jsonl", "task_args": {"level": 1}}, "task_args", "name a task"),
        ({"path": "a.jsonl", "seed": 0}, "seed", "name a task"),
        ({"task": "arithmetic", "columns": {"prompt": "x"}}, "columns", "remove it"),
        ({"task": "arithmetic", "format": "gsm8k"}, "format", "remove it"),
        ({"path": "a.jsonl", "columns": {"promt": "x"}}, "columns", "did you mean `prompt`?"),
    ],
)
def test_keys_without_effect_are_refused(source: dict[str, Any], key: str, repair: str) -> None:
    with pytest.raises(ValidationError) as caught:
        PromptSourceConfig(**source)
    (problem,) = caught.value.errors()
    assert problem["ctx"]["key"] == key
    assert repair in problem["ctx"]["repair"]


@pytest.mark.parametrize(
    ("prompts", "key"),
    [({"template": "no place"}, "template"), ({"system_prompt": "x", "chat": False}, "system_prompt")],
)
def test_words_around_prompts_that_cannot_be_are_refused(prompts: dict[str, Any], key: str) -> None:
    with pytest.raises(ValidationError) as caught:
        PromptsConfig(**prompts)
    (problem,) = caught.value.errors()
    assert problem["ctx"]["key"] == key
    assert problem["ctx"]["repair"]


def test_prompts_need_no_torch() -> None:
    code = "import sys, forge.data.prompts; print('torch' in sys.modules, 'reasoning_gym' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert ran.stdout.split() == ["False", "False"]
