"""What the GPU benchmarks train: sizes, a model made on the spot, prompts of one length, and the reward.

Only the standard library is imported at the top: this file also runs in TRL's environment. No model can be downloaded
where these run, so weights are drawn at random. Speed and memory do not care. How far sampler and trainer are apart
does: that figure is one of random weights, and says which side is closer rather than how close a trained model is.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
EVENTS = "FORGE_BENCHMARK_EVENTS"
"""The variable that names the file into which a side writes what it has measured, line by line."""

QUICK_VOCABULARY = 1024
"""Of the shapes `tiny`: more than their tokenizer has, as with the real shapes."""
CHANGED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "tiny": ("tiny", {"vocab_size": QUICK_VOCABULARY}),
    "tiny_moe": (
        "tiny",
        {
            "family": "qwen3_moe",
            "vocab_size": QUICK_VOCABULARY,
            "num_experts": 8,
            "num_experts_per_token": 2,
            "expert_intermediate_size": 64,
        },
    ),
    "qwen3_moe_2_6b": ("qwen3_30b_a3b", {"num_layers": 6, "num_experts": 64}),
}
"""Shapes that are presets with changes: a mixture of experts as wide as Qwen3-30B-A3B, which trains on one GPU."""
SHAPES = ("qwen3_0_6b", "qwen3_1_7b", *CHANGED)
SHARPNESS = 2.0
"""What the weight of the last norm is, and so what logits are multiplied by: tokens are not all equally likely."""
STD = 0.02
NUM_PROMPTS = 1024
"""In the file, which is gone through again where steps need more."""


@dataclass(frozen=True)
class Plan:
    """One GRPO step, the same for every side.

    Attributes:
        shape: the preset whose shape the model has.
        device: `cuda`, or `cpu` to try the programs out.
        num_prompts, group_size: prompts of a step, and completions of each.
        prompt_tokens, max_tokens: tokens of every prompt, and of every completion: exactly so many.
        tail: the spread of log-normal lengths instead, whose median is `tail_median` and which are cut at
            `max_tokens`; 0 for completions of one length.
        num_steps: steps that are measured; `num_warm` steps before them are not.
        precision: `mixed` computes in bfloat16 with float32 weights, gradients and optimizer states; `pure` has all of
            them in bfloat16; `float32` is for a CPU.
        microbatch_tokens, checkpointing: ours: tokens that go through the model at once (by default two whole groups,
            whose prompts count once), and what is computed again.
        rows, gradient_checkpointing, liger, attention: TRL's: samples that go through the model at once, and so on;
            `attention` is transformers' name of a kernel.
        warm_tokens: TRL's: the most tokens of a completion in steps that do not count; 0 for as many as in the others.
            A pass over a full batch of made-up samples then takes their place in warming up the training step.
        vllm_memory: the part of the GPU that vLLM may take where it sleeps while the trainer works, ours and TRL's.
        only_start: a side ends when it has started: how long that takes is all that is measured.
        settings: further settings of our sides, `KEY=VALUE`; `trl` further ones of TRL's, with JSON values.
    """

    shape: str = "qwen3_1_7b"
    device: str = "cuda"
    num_prompts: int = 64
    group_size: int = 8
    prompt_tokens: int = 512
    max_tokens: int = 1024
    tail: float = 0.0
    tail_median: int = 600
    num_steps: int = 2
    num_warm: int = 1
    precision: str = "mixed"
    microbatch_tokens: int = 17408
    checkpointing: str = "none"
    rows: int = 8
    gradient_checkpointing: bool = True
    liger: bool = False
    attention: str = "sdpa"
    warm_tokens: int = 0
    vllm_memory: float = 0.5
    learning_rate: float = 1e-6
    seed: int = 0
    only_start: bool = False
    settings: tuple[str, ...] = ()
    trl: tuple[str, ...] = ()

    @property
    def num_samples(self) -> int:
        """Completions that one step learns from."""
        return self.num_prompts * self.group_size

    @property
    def seq_len(self) -> int:
        return self.prompt_tokens + self.max_tokens

    @property
    def file_dtype(self) -> str:
        """What the model's files are in, and so what vLLM computes in."""
        return "float32" if self.precision == "float32" else "bfloat16"

    @property
    def total_steps(self) -> int:
        return self.num_warm + self.num_steps

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def read(cls, path: Path) -> Plan:
        found = json.loads(path.read_text())
        return cls(**{**found, "settings": tuple(found["settings"]), "trl": tuple(found["trl"])})


QUICK = Plan(
    shape="tiny",
    device="cpu",
    num_prompts=2,
    group_size=4,
    prompt_tokens=24,
    max_tokens=8,
    num_steps=2,
    precision="float32",
    microbatch_tokens=128,
    rows=4,
    gradient_checkpointing=False,
)
"""Every path in seconds, on a CPU; figures mean nothing."""


def resized(plan: Plan, **wanted: Any) -> Plan:
    """The plan with what was asked for; None leaves a value as it is."""
    return replace(plan, **{name: value for name, value in wanted.items() if value is not None})


def say(event: str, **values: Any) -> None:
    """Tell the measuring program. Without one, print."""
    line = json.dumps({"event": event, **values})
    path = os.environ.get(EVENTS)
    if path is None:
        print(line, flush=True)
        return
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def do_and_end(work: Callable[[], None]) -> NoReturn:
    """Do a side's work and end its process at once: engines may leave threads that would hold it."""
    code = 0
    try:
        work()
    except Exception:  # noqa: BLE001 - whatever it is, the measuring program reads it in the log
        traceback.print_exc()
        code = 1
    leave(code)


def leave(code: int = 0) -> NoReturn:
    """End this process at once."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# ---- Lengths


def length_of(plan: Plan, group: int, member: int) -> int:
    """Return how many tokens a completion of a group has, by the group's number in the run: the same on every side."""
    if not plan.tail:
        return plan.max_tokens
    drawn = random.Random(f"{plan.seed}:{group}:{member}").lognormvariate(math.log(plan.tail_median), plan.tail)
    return max(1, min(plan.max_tokens, round(drawn)))


# ---- The reward


def spread(token_ids: Sequence[int]) -> float:
    """A number from 0 to 1 that depends on every token: it costs nothing, and no group is without signal for long."""
    return sum(token_ids) % 97 / 96


def reward(prompt: Any, completion: Any) -> float:
    """`spread` as our rewards are called: `harness.gpu_plan:reward`."""
    return spread(completion.token_ids)


# ---- The files


def facts_of(shape: str) -> Any:
    """The facts of the model."""
    from forge.config import ModelConfig
    from forge.models.architecture import complete

    preset, changed = CHANGED.get(shape, (shape, {}))
    return complete(ModelConfig(preset=preset)).model_copy(update={"preset": None, **changed})


def prepare(folder: Path, plan: Plan) -> dict[str, Any]:
    """Write the model and the prompts that all sides begin with, unless they are there, and say what they are."""
    from forge.models.sizes import num_parameters

    model, prompts = model_folder(folder, plan), prompts_file(folder, plan)
    if not model.exists():
        partial = model.with_name(f"{model.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        path = plan.write(folder / "model.plan.json")
        words = [str(Path(__file__).resolve()), str(path), str(partial)]
        subprocess.run([sys.executable, *words], check=True)  # the GPU's memory is free again when it has ended
        partial.rename(model)
    if not prompts.exists():
        _write_prompts(prompts, model, plan)
    facts = facts_of(plan.shape)
    return {"model": str(model), "prompts": str(prompts), "parameters": num_parameters(facts)}


def model_folder(folder: Path, plan: Plan) -> Path:
    return folder / f"{plan.shape}-{plan.device}-{plan.file_dtype}"


def prompts_file(folder: Path, plan: Plan) -> Path:
    return folder / f"prompts-{plan.prompt_tokens}.jsonl"


def write_model(folder: Path, plan: Plan) -> None:
    """Write a Hugging Face folder: random weights, and the tiny model's tokenizer with a word for every token id."""
    import torch
    from safetensors.torch import save_file

    from forge.models.hf_config import write_hf_config
    from forge.models.tiny import SPECIAL_IDS, make_tiny, tensor_shapes

    facts = facts_of(plan.shape)
    make_tiny(folder, num_layers=1)
    widen_tokenizer(folder / "tokenizer.json", facts.vocab_size)
    dtype = plan.file_dtype
    write_hf_config(facts, folder, dtype=dtype, special_ids=SPECIAL_IDS)
    generator = torch.Generator(plan.device).manual_seed(plan.seed)

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = torch.empty(shape, device=plan.device, dtype=getattr(torch, dtype))
        if len(shape) == 1:
            return tensor.fill_(SHARPNESS if name == "model.norm.weight" else 1.0).cpu()
        return tensor.normal_(0.0, STD, generator=generator).cpu()

    weights = {name: draw(name, shape) for name, shape in tensor_shapes(facts)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def widen_tokenizer(path: Path, vocab_size: int) -> None:
    """Give every id of the model's vocabulary a word of letters, which text is never encoded to.

    Random weights sample ids that a small tokenizer does not have. vLLM's incremental detokenizer keeps such ids and
    decodes all of them again at the next token, which a real model never makes it do.
    """
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    vocab.update(
        {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    )  # or they would move to the end
    taken = set(vocab.values())
    for index in range(vocab_size):
        if index not in taken:
            letters = (index // 26**place % 26 for place in range(4))
            vocab["q" + "".join(chr(ord("a") + letter) for letter in letters)] = index
    path.write_text(json.dumps(tokenizer), encoding="utf-8")


def _write_prompts(path: Path, model: Path, plan: Plan) -> None:
    """Questions of random digits, each of which is a token: with the chat template exactly `prompt_tokens`."""
    from forge.models.tokenizer import ChatTokenizer

    tokenizer = ChatTokenizer.load(model)

    def length(text: str) -> int:
        return len(tokenizer.encode_prompt([{"role": "user", "content": text}]))

    frame = length("1") - 1
    num_digits = plan.prompt_tokens - frame
    if num_digits < 1:
        raise ValueError(f"a prompt of {plan.prompt_tokens} tokens has no room in a template of {frame}")
    draw = random.Random(plan.seed)
    lines = []
    for _ in range(NUM_PROMPTS):
        text = "".join(draw.choice("0123456789") for _ in range(num_digits))
        lines.append(json.dumps({"prompt": text, "answer": "0"}))
    assert length(json.loads(lines[0])["prompt"]) == plan.prompt_tokens
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_model(Path(sys.argv[2]), Plan.read(Path(sys.argv[1])))
