"""lm-eval, in a venv of its own, evaluates a served model: by likelihood and by what it says."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from foreign_packages import LM_EVAL
from forge.envs.external.venvs import VenvError, python_of
from forge.generator.openai import OpenAIServer
from tiny_serving import tiny, with_tiny_served

REQUIREMENTS = LM_EVAL
NUM_TASKS = 6

BY_LIKELIHOOD = """\
task: forge_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}} Answer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{gold}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
BY_TEXT = """\
task: forge_say
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "Question: {{{{question}}}} Answer:"
doc_to_target: "{{{{choices[gold]}}}}"
generation_kwargs: {{max_gen_toks: 8, until: ["~~"]}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(scope="module")
def python() -> Path:
    """The Python with lm-eval. Tests are skipped where it cannot be installed."""
    try:
        return python_of(REQUIREMENTS)
    except VenvError as error:
        pytest.skip(f"lm-eval cannot be installed here: {str(error)[-400:]}")


def make_tasks(folder: Path) -> list[dict[str, Any]]:
    records = [
        {
            "question": f"What is {number} + {number}?",
            "choices": [f"{2 * number}", f"{2 * number + 1}", f"{number + 5}"],
            "gold": number % 3,
        }
        for number in range(NUM_TASKS)
    ]
    file = folder / "tasks.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "choice.yaml").write_text(BY_LIKELIHOOD.format(file=file))
    (folder / "say.yaml").write_text(BY_TEXT.format(file=file))
    return records


def run_lm_eval(python: Path, folder: Path, kind: str, path: str, *words: str) -> dict[str, list[dict[str, Any]]]:
    """Run lm-eval against a server, and return the samples that it recorded, by task."""

    async def run(server: OpenAIServer) -> None:
        arguments = f"model=tiny,base_url={server.base_url}/{path},tokenizer={tiny()},tokenizer_backend=huggingface"
        command = ["-m", "lm_eval", "run", "--model", kind, "--model_args", f"{arguments},max_retries=1,max_length=512"]
        command += ["--include_path", str(folder), "--output_path", str(folder / "out"), "--log_samples", *words]
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OPENAI_API_KEY")}
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
        process = await asyncio.create_subprocess_exec(
            str(python),
            *command,
            env={**kept, **offline},
            cwd=folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, output.decode()[-4000:]

    with_tiny_served(run)
    found: dict[str, list[dict[str, Any]]] = {}
    for file in (folder / "out").rglob("samples_*.jsonl"):
        task = file.name.removeprefix("samples_").rsplit("_", 1)[0]
        found[task] = [json.loads(line) for line in file.read_text().splitlines()]
    return found


def test_choices_by_likelihood_and_greedy_texts_are_those_of_the_model(python: Path, tmp_path: Path) -> None:
    records = make_tasks(tmp_path)
    tasks = ("--tasks", "forge_choice,forge_say")
    found = run_lm_eval(python, tmp_path, "local-completions", "completions", *tasks)
    model = AutoModelForCausalLM.from_pretrained(tiny(), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny())
    assert len(found["forge_choice"]) == len(found["forge_say"]) == NUM_TASKS
    for sample in found["forge_choice"]:
        record = records[sample["doc_id"]]
        context = f"Question: {record['question']} Answer:"
        start = len(tokenizer(context)["input_ids"])
        for choice, (answer,) in zip(record["choices"], sample["resps"], strict=True):
            ids = torch.tensor([tokenizer(f"{context} {choice}")["input_ids"]])
            with torch.no_grad():
                table = torch.log_softmax(model(ids).logits[0, :-1], -1)
            own = table[torch.arange(ids.shape[1] - 1), ids[0, 1:]][start - 1 :]
            assert float(answer[0]) == pytest.approx(float(own.sum()), abs=1e-3)
            is_greedy = bool((table.argmax(-1)[start - 1 :] == ids[0, start:]).all())
            assert str(answer[1]) == str(is_greedy)
    for sample in found["forge_say"]:
        context = f"Question: {records[sample['doc_id']]['question']} Answer:"
        ids = tokenizer(context, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            longer = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        assert sample["resps"][0][0] == tokenizer.decode(longer, skip_special_tokens=True)


def test_conversations(python: Path, tmp_path: Path) -> None:
    make_tasks(tmp_path)
    words = ("--tasks", "forge_say", "--apply_chat_template")
    found = run_lm_eval(python, tmp_path, "local-chat-completions", "chat/completions", *words)
    assert len(found["forge_say"]) == NUM_TASKS
    assert all(isinstance(sample["resps"][0][0], str) for sample in found["forge_say"])
