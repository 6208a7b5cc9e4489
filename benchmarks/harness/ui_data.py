"""A run as large as those that people have trouble to look at, written by the library's own writers."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from forge.config import RecordConfig
from forge.observe.jsonl import JsonlSink
from forge.observe.tensorboard import TensorBoardSink
from forge.rollout.record import RolloutRecorder
from forge.types import Episode, Group, VersionSpan

SUPPORT = Path(__file__).resolve().parents[2] / "tests" / "support"
sys.path.append(str(SUPPORT))

from run_folders import CONFIG, decode, encode, make_groups, rollout_values, trainer_logprobs, training_values  # noqa: E402

NEEDLE = "a needle in step {step}"
NEEDLE_EVERY = 10_000
_NUM_TEMPLATES = 64
_MORE_METRICS = 12


@dataclass(frozen=True)
class Size:
    """How much there is: steps, each with metrics and rollouts."""

    num_steps: int = 100_000
    num_groups: int = 2
    group_size: int = 5

    @property
    def num_rollouts(self) -> int:
        return self.num_steps * self.num_groups * self.group_size


def make_data(folder: Path, size: Size, *, log: Callable[[str], None]) -> None:
    """Make `runs/large` and `events` in a folder, unless they are there in this size."""
    marker = folder / "size.json"
    if marker.exists() and json.loads(marker.read_text()) == asdict(size):
        return
    run = folder / "runs" / "large"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(CONFIG.format(max_steps=size.num_steps))
    began = time.perf_counter()
    write_metrics(run, folder / "events", size)
    log(f"metrics of {size.num_steps:,} steps in {time.perf_counter() - began:.0f} s")
    began = time.perf_counter()
    recorder = RolloutRecorder(run / "rollouts", decode=decode, config=RecordConfig(), resume_step=None)
    for step, groups, logprobs in rollouts(size):
        recorder.write(step, groups, logprobs)
    log(f"{size.num_rollouts:,} rollouts in {time.perf_counter() - began:.0f} s")
    marker.write_text(json.dumps(asdict(size)))


def write_metrics(run: Path, events: Path, size: Size) -> None:
    """Write the same metrics of every step as the run's own file and as TensorBoard's events."""
    chance, now = random.Random(1), [1_790_000_000.0]
    own, peer = JsonlSink(run / "metrics.jsonl", clock=lambda: now[0]), TensorBoardSink(events)
    for step in range(1, size.num_steps + 1):
        part = step / size.num_steps
        values = rollout_values(part, step, chance) | training_values(part, part, chance)
        values |= {f"runtime/more_{number}": chance.random() for number in range(_MORE_METRICS)}
        now[0] += 1.0
        own.write(step, values)
        peer.write(step, values)
    own.close()
    peer.close()


Step = tuple[int, Sequence[Group], dict[tuple[int, int], list[float]]]


def rollouts(size: Size) -> Iterator[Step]:
    """Yield the groups of every step with the trainer's logprobs. Texts and logprobs are those of a few templates."""
    shape = {"num_groups": size.num_groups, "group_size": size.group_size}
    templates = [make_groups(number + 1, skill=number / _NUM_TEMPLATES, **shape) for number in range(_NUM_TEMPLATES)]
    learned = [trainer_logprobs(groups, seed=number) for number, groups in enumerate(templates)]
    chance = random.Random(2)
    for step in range(1, size.num_steps + 1):
        number = min(_NUM_TEMPLATES - 1, int(chance.betavariate(2, 2) * _NUM_TEMPLATES))
        groups, logprobs = templates[number], learned[number]
        first = (step - 1) * size.num_groups
        made = [_at(group, first + place, step, chance) for place, group in enumerate(groups)]
        renamed = {(first + place, index): logprobs[group.number, index] for place, group in enumerate(groups)
                   for index in range(size.group_size)}  # fmt: skip
        if step % NEEDLE_EVERY == 0 or step == size.num_steps // 2:
            made[0] = _with_text(made[0], NEEDLE.format(step=step))
            renamed[made[0].number, 0] = list(made[0].episodes[0].logprobs)
        yield step, made, renamed


def _at(group: Group, number: int, step: int, chance: random.Random) -> Group:
    def at(episode: Episode) -> Episode:
        turn = episode.turns[0]
        version = VersionSpan(max(0, step - 1 - chance.randrange(3)), 0, len(turn))
        score = replace(episode.score, reward=round(episode.score.reward + chance.gauss(0, 0.05), 4))
        return replace(episode, turns=(replace(turn, versions=(version,)),), score=score)

    return replace(group, number=number, episodes=tuple(map(at, group.episodes)))


def _with_text(group: Group, text: str) -> Group:
    first, *others = group.episodes
    ids = encode(text)
    values = {"token_ids": ids, "logprobs": (-1.0,) * len(ids), "text": text}
    turn = replace(first.turns[0], **values, full_logprobs=None, versions=(VersionSpan(0, 0, len(ids)),))
    return replace(group, episodes=(replace(first, turns=(turn,), ref_logprobs=(-1.0,) * len(ids)), *others))
