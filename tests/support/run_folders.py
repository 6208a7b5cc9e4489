"""Folders as runs leave them, made up by seed: plausible curves, and rollouts that went through the real recorder."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from forge.config import RecordConfig
from forge.observe import JsonlSink
from forge.observe.trace_file import TraceFile
from forge.observe.tracing import ORIGIN_NS, Process, Span
from forge.rollout.record import RolloutRecorder
from forge.rollout.signal import NoSignalGroup
from forge.types import Completion, Episode, Group, Score, Task, VersionSpan

HOSTILE = (
    "</script><script>document.title='broken'</script><!-- <img src=x onerror=alert(1)> &lt; \u2028\u2029 \x00 \ud800"
)
"""Text that would do harm in a page that took it for markup."""

WORDS = [
    "<think>", "</think>", "<answer>", "</answer>", "\n", " ", "Let", " me", " add", " the", " tens", " first", ":",
    "+", "-", "=", " so", " that", " makes", " wait", ",", " check", " again", ".", " The", " result", " is",
    *"0123456789", " ten", " carry", " one", "<|im_end|>",
]  # fmt: skip
VOCABULARY = [word.encode() for word in WORDS] + [bytes([byte]) for byte in range(256)]
BYTES_FROM = len(WORDS)
END = WORDS.index("<|im_end|>")

CONFIG = """\
# The resolved configuration of this run, written by forge.
run:
  name: arithmetic-grpo
  seed: 7
model:
  preset: tiny
algorithm:
  preset: dapo
rollout:
  batch_groups: 8
  group_size: 8
  staleness: 2
placement: apart
generator:
  engine: native
training:
  max_steps: {max_steps}
"""


def decode(token_ids: Sequence[int]) -> str:
    """Text of tokens, where bytes that make no character become U+FFFD, as byte-level tokenizers do."""
    return b"".join(VOCABULARY[token] for token in token_ids).decode("utf-8", "replace")


def encode(text: str) -> tuple[int, ...]:
    """The longest word that fits at each place, else a byte."""
    rest, ids = text.encode("utf-8", "replace"), []
    while rest:
        fitting = [number for number, word in enumerate(VOCABULARY[:BYTES_FROM]) if rest.startswith(word)]
        best = max(fitting, key=lambda number: len(VOCABULARY[number]), default=BYTES_FROM + rest[0])
        ids.append(best)
        rest = rest[len(VOCABULARY[best]) :]
    return tuple(ids)


def write_metrics(folder: Path, num_steps: int, *, seed: int = 0, evaluate: bool = True) -> None:
    """The figures of a GRPO run whose reward rises."""
    chance = random.Random(seed)
    now = [1_790_000_000.0]
    sink = JsonlSink(folder / "metrics.jsonl", clock=lambda: now[0])
    for step in range(1, num_steps + 1):
        part = step / max(60, num_steps)
        skill = 1 / (1 + math.exp(-9 * (part - 0.35)))
        values = rollout_values(skill, step, chance) | training_values(skill, part, chance)
        times = {name.partition("/")[2]: value for name, value in values.items() if name.startswith("time/")}
        values["time/step"] = sum(times.values())
        now[0] += values["time/step"]
        sink.write(step, values)
        if evaluate and (step == 1 or step % 10 == 0):
            solved = min(1.0, max(0.0, 0.22 + 0.7 * skill + chance.gauss(0, 0.015)))
            held_out = {"evaluation/reward": solved, "evaluation/pass@1": solved}
            held_out |= {"evaluation/pass@4": 1 - (1 - solved) ** 2.2, "evaluation/length": 20 + 9 * skill}
            sink.write(step, held_out | {"evaluation/num_prompts": 128})
    sink.close()


def rollout_values(skill: float, step: int, chance: random.Random) -> dict[str, float]:
    reward = 0.12 + 0.8 * skill + chance.gauss(0, 0.035)
    return {
        "rollout/reward_mean": reward,
        "rollout/reward_std": 0.08 + 0.32 * math.sqrt(max(0.0, skill * (1 - skill))) + chance.random() * 0.03,
        "rollout/length_mean": 18 + 10 * skill + chance.gauss(0, 0.8),
        "rollout/truncated": max(0.0, 0.2 - 0.2 * skill + chance.gauss(0, 0.01)),
        "rollout/num_no_signal": float(int(4 * skill**3 + chance.random() * 2)),
        "rollout/num_failed": float(chance.random() < 0.06),
        "rollout/num_stale": float(chance.random() < 0.03),
        "rollout/staleness_mean": 0.0 if step == 1 else 0.8 + chance.random() * 0.5,
        "rollout/staleness_max": 0.0 if step == 1 else float(1 + (chance.random() < 0.4)),
        "rollout/tokens_per_s": 5200 + 500 * chance.gauss(0, 1),
        "rollout/samples_per_s": 190 + chance.gauss(0, 14),
        "reward/exact": 0.1 + 0.8 * skill + chance.gauss(0, 0.03),
        "reward/format": min(1.0, 0.45 + 0.7 * skill + chance.gauss(0, 0.02)),
        "time/waiting": 0.02 + 0.05 * chance.random(),
        "time/generating": 0.21 + 0.04 * chance.random(),
        "time/syncing": 0.012 + 0.006 * chance.random(),
        "time/other": 0.01 + 0.01 * chance.random(),
        "sync/seconds": 0.018 + 0.01 * chance.random(),
        "sync/stall_s": 0.004 + 0.002 * chance.random(),
        "sync/received_mib": 0.0,
    }


def training_values(skill: float, part: float, chance: random.Random) -> dict[str, float]:
    return {
        "train/loss": -0.01 + 0.02 * chance.gauss(0, 1),
        "train/kl": 0.0002 + 0.05 * skill * (1 + 0.2 * chance.random()),
        "train/approx_kl": 0.0008 + 0.0009 * chance.random(),
        "train/entropy": 1.35 - 0.95 * skill + 0.03 * chance.gauss(0, 1),
        "train/ratio_mean": 1 + 0.004 * chance.gauss(0, 1),
        "train/ratio_max": 1.5 + abs(0.5 * chance.gauss(0, 1)),
        "train/grad_norm": 0.6 * math.exp(-part) + 0.1 * abs(chance.gauss(0, 1)),
        "train/learning_rate": 3e-4 * min(1.0, part * 12) * (1 - 0.8 * part),
        "train/tokens_per_s": 7900 + 400 * chance.gauss(0, 1),
        "time/training": 0.16 + 0.03 * chance.random(),
        "runtime/queue_depth": 4 + chance.random(),
    }


def make_groups(step: int, *, num_groups: int, group_size: int, seed: int = 0, skill: float = 0.5) -> list[Group]:
    """Groups of one step with rewards, versions and logprobs. The same for the same arguments."""
    chance = random.Random(seed * 100_003 + step)
    groups = []
    for place in range(num_groups):
        number = (step - 1) * num_groups + place
        one, other = chance.randint(10, 99), chance.randint(10, 99)
        prompt = Task(
            id=f"arithmetic:{seed}:{number}",
            messages=(
                {"role": "system", "content": "Think inside <think> tags, then answer inside <answer> tags."},
                {"role": "user", "content": f"What is {one} + {other}?"},
            ),
            answer=str(one + other),
        )
        scored = [
            _episode(prompt, one + other, step=step, skill=skill, chance=chance, index=i) for i in range(group_size)
        ]
        mean = sum(episode.score.reward for episode in scored) / group_size
        episodes = tuple(replace(episode, advantage=episode.score.reward - mean) for episode in scored)
        groups.append(Group(number=number, epoch=number // 500, episodes=episodes))
    return groups


def _episode(prompt: Task, total: int, *, step: int, skill: float, chance: random.Random, index: int) -> Episode:
    is_right = chance.random() < 0.1 + 0.85 * skill
    said = total if is_right else total + chance.choice([-10, -1, 1, 10])
    thought = f"<think>Let me add the tens first: {total // 10 * 10} so that makes {said}. wait, check again."
    text = f"{thought}\n The result is {said}</think>\n<answer>{said}</answer>"
    if chance.random() < 0.12:
        text = f"<think>Größe: π ≈ 3, 算 {said} 🙂 carry one</think>\n<answer>{said}</answer>"
    is_cut = chance.random() < 0.08 * (1.2 - skill)
    ids = (*encode(text)[: 14 if is_cut else None], *(() if is_cut else (END,)))
    logprobs = tuple(-abs(chance.gauss(0, 0.9 - 0.6 * skill)) for _ in ids)
    middle = len(ids) // 2 if step > 2 and chance.random() < 0.3 else 0
    versions = (VersionSpan(step - 3, 0, middle), VersionSpan(step - 2, middle, len(ids))) if middle else ()
    failures = {"exact": "took longer than 10 s and was killed"} if chance.random() < 0.02 else {}
    exact = 0.0 if failures or is_cut else float(is_right)
    form = 0.0 if is_cut else 1.0
    completion = Completion(
        prompt_ids=tuple(range(40)),
        token_ids=ids,
        logprobs=logprobs,
        full_logprobs=logprobs,
        text=text,
        finish_reason="length" if is_cut else "stop",
        versions=versions or (VersionSpan(step - 1, 0, len(ids)),),
        index=index,
    )
    score = Score(reward=exact + 0.1 * form, parts={"exact": exact, "format": form}, failures=failures)
    ref_logprobs = tuple(value - abs(chance.gauss(0, 0.4 * skill)) for value in logprobs)
    return Episode.single(prompt, completion, score, ref_logprobs=ref_logprobs)


def trainer_logprobs(groups: Sequence[Group], *, seed: int = 0) -> dict[tuple[int, int], list[float]]:
    """The sampler's with a small difference, and a large one now and then."""
    chance = random.Random(seed)
    return {
        (group.number, index): [
            min(-1e-4, value + chance.gauss(0, 0.9 if chance.random() < 0.06 else 0.04)) for value in episode.logprobs
        ]
        for group in groups
        for index, episode in enumerate(group.episodes)
    }


def write_rollouts(folder: Path, steps: Sequence[int], *, num_groups: int = 2, group_size: int = 4) -> None:
    recorder = RolloutRecorder(folder / "rollouts", decode=decode, config=RecordConfig(), resume_step=None)
    for step in steps:
        skill = 1 / (1 + math.exp(-9 * (step / max(60, steps[-1]) - 0.35)))
        groups = make_groups(step, num_groups=num_groups, group_size=group_size, skill=skill)
        recorder.write(step, groups, trainer_logprobs(groups, seed=step))


def write_other_rollouts(folder: Path, steps: Sequence[int]) -> None:
    """For each step a group that taught nothing, and an evaluation of one prompt."""
    recorder = RolloutRecorder(folder / "rollouts", decode=decode, config=RecordConfig(), resume_step=max(steps))
    for step in steps:
        (group,) = make_groups(step, num_groups=1, group_size=4)
        recorder.write_no_signal(step, NoSignalGroup(group.number, "no_signal", "all_zero", group))
        recorder.write_evaluation(step, [group])


def write_ledger(folder: Path, *, num_trained: int, num_no_signal: int = 3) -> None:
    outcomes = ["trained"] * num_trained + ["no_signal"] * num_no_signal
    lines = [
        json.dumps({"step": number // 8 + 1, "group": number, "epoch": 0, "prompt": f"p:{number}", "outcome": outcome})
        for number, outcome in enumerate(outcomes)
    ]
    (folder / "ledger.jsonl").write_text("\n".join(lines) + "\n")


def make_grpo_run(folder: Path, *, num_steps: int = 60, max_steps: int | None = None, num_groups: int = 2) -> Path:
    """A whole run: figures, configuration, rollouts and ledger. With a larger `max_steps` it is one that goes on."""
    folder.mkdir(parents=True, exist_ok=True)
    write_metrics(folder, num_steps)
    (folder / "config.yaml").write_text(CONFIG.format(max_steps=max_steps or num_steps))
    write_rollouts(folder, range(1, num_steps + 1), num_groups=num_groups)
    write_ledger(folder, num_trained=8 * num_steps)
    return folder


def make_sft_run(folder: Path, *, num_steps: int = 80) -> Path:
    """A fine-tuning run: losses, one of them NaN, and nothing else."""
    chance = random.Random(1)
    now = [1_790_000_000.0]
    sink = JsonlSink(folder / "metrics.jsonl", clock=lambda: now[0])
    for step in range(1, num_steps + 1):
        now[0] += 0.4
        loss = 0.4 + 3 * math.exp(-step / 20) + 0.06 * chance.gauss(0, 1)
        figures = {"train/loss": math.nan if step == num_steps // 2 else loss, "train/learning_rate": 1e-3 / step}
        sink.write(step, figures | {"train/grad_norm": 1.0 + chance.random(), "train/tokens_per_s": 9000.0})
        if step % 20 == 0:
            sink.write(step, {"validation/loss": 0.5 + 3 * math.exp(-step / 20), "validation/best": True})
    sink.close()
    return folder


def write_trace(path: Path, count: int, *, process: str = "controller") -> None:
    """A trace in which a process trains for half of each of the first seconds."""
    own = Process("host", 10, process)
    with TraceFile(path) as file:
        for number in range(count):
            start = ORIGIN_NS + number * 10**9
            file.write([Span("train", start, start + 5 * 10**8, own, "Task", {"step": number})])


def write_system(path: Path, num_steps: int) -> None:
    """What two processes used at each step."""
    sink = JsonlSink(path)
    for step in range(1, num_steps + 1):
        values = {"cpu/trainer[0]": 1.0 + step % 3, "memory_gib/trainer[0]": 2.0, "version/generator[0]": step - 1}
        sink.write(step, values)
    sink.close()
