"""What `grpo_tools.py` trains: the task, its tool, the chat template, the reward and the files that both sides read.

A question names three boxes and asks for the number in the last one. The model opens one box in each turn with the
tool, and then answers: four turns. Every number has two digits and every box one, and the tokenizer keeps digits apart,
so all episodes in the form of the demonstrations have as many tokens in each turn.

Only the standard library is imported at the top: this file also runs in TRL's environment.
"""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

from harness.grpo_plan import Plan, teach

NUM_BOXES = 10
NUM_CALLS, MAX_TURNS = 3, 4
NUM_PROMPTS, NUM_SHOWN = 512, 4000

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}
{{- message['content'] or '' }}
{%- for call in message['tool_calls'] or [] %}
{{- '<tool_call>{"name": "' + call['function']['name'] + '", "arguments": ' }}
{{- call['function']['arguments'] | tojson }}
{{- '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}
{%- endgeneration %}
{{- '\\n' }}
{%- else %}
{{- message['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""Qwen's form of calls, without its list of tools in the prompt. Both sides render with it; earlier messages stay as
they are when later ones follow, which TRL's tool loop requires."""


@dataclass(frozen=True)
class ToolsPlan(Plan):
    """As `Plan`, but `max_tokens` is the most that one turn may have, and turns end at the end-of-turn token.

    Attributes:
        max_completion_tokens: what a whole episode may have after its prompt, on TRL's side, which needs such a limit;
            more than the four turns of the demonstrations have.
        temperature: of sampling. At 1, some calls are malformed, which the sides treat differently: ours tells the
            model and continues, TRL takes the call for an answer.
    """

    max_tokens: int = 72
    max_seq_len: int = 336
    max_completion_tokens: int = 288
    temperature: float = 0.5
    learning_rate: float = 1e-6
    num_rounds: int = 4
    window: int = 2
    sft_steps: int = 120


# ---- The task


def number_in(box: int) -> int:
    """Return the number in a box: always the same, because TRL's tools do not know the task."""
    return 10 + (37 * box + 11) % 90


def open_box(box: int) -> str:
    """
    Return the number in a box.

    Args:
        box: The box to open.

    Returns:
        The number in the box.
    """
    if not 0 <= box < NUM_BOXES:
        raise ValueError(f"there is no box {box}")
    return str(number_in(box))


def is_right(text: str, answer: str) -> float:
    """1 if the text gives the right number in the form that was shown, else 0."""
    return float(text.strip() == f"It is {answer}.")


def question(boxes: Iterable[int]) -> list[dict[str, str]]:
    """Return the messages of a task."""
    return [{"role": "user", "content": f"Open {', '.join(map(str, boxes))}. What is in the last?"}]


def shown(boxes: Iterable[int]) -> dict[str, Any]:
    """Return an episode as it should be, for the supervised warm-up."""
    messages = question(boxes := tuple(boxes))
    for box in boxes:
        call = json.dumps({"name": "open_box", "arguments": {"box": box}})
        messages.append({"role": "assistant", "content": f"<tool_call>{call}</tool_call>"})
        messages.append({"role": "tool", "content": open_box(box)})
    messages.append({"role": "assistant", "content": f"It is {number_in(boxes[-1])}."})
    return {"messages": messages}


# ---- The files


def write_task(folder: Path, *, seed: int = 0) -> Path:
    """Write demonstrations.jsonl and prompts.jsonl into a new folder."""
    folder.mkdir(parents=True)
    rng = random.Random(seed)
    asked = list(permutations(range(NUM_BOXES), NUM_CALLS))
    rng.shuffle(asked)
    tasks = asked[:NUM_PROMPTS]
    _write(folder / "demonstrations.jsonl", (shown(rng.choice(asked)) for _ in range(NUM_SHOWN)))
    _write(
        folder / "prompts.jsonl",
        ({"messages": question(boxes), "answer": str(number_in(boxes[-1]))} for boxes in tasks),
    )
    return folder


def read_tasks(path: Path) -> list[dict[str, Any]]:
    """Return the records `{"messages", "answer"}`."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def prepare(folder: Path, plan: ToolsPlan, *, start: Path | None = None) -> dict[str, Any]:
    """Write the task and the model that all sides start from, and return what they are.

    `start` is a folder with such a model from an earlier run. Otherwise one is made and trained on demonstrations for
    `plan.sft_steps` steps.
    """
    from forge.models.tiny import make_tiny, tensor_shapes

    task = write_task(folder / "task")
    facts = make_tiny(folder / "untaught", **plan.shape)
    (folder / "untaught" / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    if start is not None:
        shutil.copytree(start, folder / "model")
    else:
        teach(folder, num_steps=plan.sft_steps)
    return {
        "parameters": sum(math.prod(shape) for _, shape in tensor_shapes(facts)),
        "num_train": len(read_tasks(task / "prompts.jsonl")),
        "sft_steps": plan.sft_steps,
    }


def _write(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
