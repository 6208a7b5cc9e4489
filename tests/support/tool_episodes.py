"""An episode with a tool, and a tiny model that was taught to call it: for runs on a device of any kind."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import torch

import forge
from forge import Agent, Task
from forge.config import DistributedConfig, TrainerConfig, TrainingConfig
from forge.models import tiny
from forge.models.hf_config import read_hf_config
from forge.models.tokenizer import ChatTokenizer
from forge.trainer.checkpointer import Checkpointer
from forge.trainer.engine import Engine
from forge.types import Batch, Sample

NUM_TURNS = 3
CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
AGAIN = {"role": "user", "content": "Again?"}
CALLS = """\
{{- message['content'] or '' }}
{%- for call in message['tool_calls'] or [] %}
{{- '<tool_call>{"name": "' + call['function']['name'] + '", "arguments": ' }}
{{- call['function']['arguments'] | tojson }}
{{- '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}"""
CHAT_TEMPLATE = tiny.CHAT_TEMPLATE.replace("{{- message['content'] + '<|im_end|>' }}", CALLS)
"""That of tiny models, with calls."""


@forge.tool
async def look() -> str:
    """Return what there is to see."""
    return "seen"


def digit_of(text: str) -> int:
    """Return the digit that an answer gives; 0 if it gives none."""
    found = re.fullmatch(r"It is (\d)\.", text.strip())
    return int(found[1]) if found else 0


@forge.episode
async def looking(task: Task, agent: Agent) -> float:
    """Call a tool, answer, and answer again. Large digits are rewarded."""
    first = await agent.run_tools(task.messages, tools=[look], max_turns=NUM_TURNS - 1)
    second = await agent.generate([AGAIN])
    return (digit_of(first.text) + digit_of(second.text)) / 18


def teach(folder: Path, *, num_steps: int = 150, with_gpus: bool, seed: int = 0) -> Path:
    """Write a tiny model that calls the tool, reads its result and answers with any digit; return its folder."""
    untaught = folder / "untaught"
    tiny.make_tiny(untaught)
    (untaught / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    tokenizer, rng = ChatTokenizer.load(untaught), random.Random(seed)

    def shown() -> Sample:
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": f"What is {rng.randrange(10)} + {rng.randrange(10)}?"},
            {"role": "assistant", "content": CALL},
            {"role": "tool", "content": "seen"},
            {"role": "assistant", "content": f"It is {rng.randrange(10)}."},
            AGAIN,
            {"role": "assistant", "content": f"It is {rng.randrange(10)}."},
        ]
        token_ids, is_answer = tokenizer.encode_chat(messages)
        return Sample(torch.tensor(token_ids), torch.tensor(is_answer).float())

    training = {"max_seq_len": 256, "microbatch_tokens": 4096, "learning_rate": 3e-3, "schedule": "constant"}
    engine = Engine(
        TrainerConfig(
            model=read_hf_config(untaught).model_copy(update={"path": str(untaught)}),
            training=TrainingConfig.model_validate(training),
            distributed=DistributedConfig(precision="float32", with_gpus=with_gpus),
        )
    )
    try:
        for _ in range(num_steps):
            loss = engine.train_step(Batch.of([shown() for _ in range(16)])).loss
        print(f"the model was taught to a loss of {loss:.3f}")
        Checkpointer(engine).export(folder / "taught", dtype="float32")
    finally:
        engine.close()
    return folder / "taught"
