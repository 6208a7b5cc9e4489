"""Scripts of faults: what is injected, into what, and when. Made from a seed, kept as a file, replayed from it."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

from forge.errors import ConfigError, DataError

FaultKind = Literal["kill", "stop", "slow", "memory", "disconnect", "disk_full", "corrupt_checkpoint", "clock"]
FAULT_KINDS: Final[tuple[FaultKind, ...]] = get_args(FaultKind)
DEFAULT_KINDS: Final[tuple[FaultKind, ...]] = ("kill", "stop", "slow")
CONTROLLER: Final = "controller"
TRAINER: Final = "trainer"
DEFAULT_ROLES: Final = ("generator", TRAINER, "reward")
_MAX_DURATION_S: Final[Mapping[str, float]] = {"stop": 5.0, "slow": 10.0, "memory": 10.0, "disk_full": 5.0}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        kind: what happens. `kill`: SIGKILL. `stop`: SIGSTOP, and SIGCONT after `duration_s`. `slow`: stopped for four
            fifths of the time. `memory`: a process beside the run takes memory. `disconnect`: one open connection of
            the process is shut down. `disk_full`: the file system of the run's folder has no room.
            `corrupt_checkpoint`: bytes of the newest checkpoint are changed, and the process that would read it is
            killed. `clock`: the run's clocks jump by `duration_s`.
        role: the worker that it hits, as processes of a run are labelled: `generator`, `trainer`, `reward`,
            `episode`, …, or `controller`.
        at_s: seconds after the first training step at which it is injected; None with `at_step`.
        at_step: the step after which it is injected; None with `at_s`.
        pick: chooses one of several processes (or connections, or bytes): the number modulo their count.
        duration_s: how long it lasts; 0 for what happens at once.
    """

    kind: FaultKind
    role: str = "generator"
    at_s: float | None = None
    at_step: int | None = None
    pick: int = 0
    duration_s: float = 0.0

    def __post_init__(self) -> None:
        if (self.at_s is None) == (self.at_step is None):
            raise ValueError("a fault has either at_s or at_step")
        if self.kind not in FAULT_KINDS:
            raise ValueError(f"there is no fault {self.kind!r}: choose from {', '.join(FAULT_KINDS)}")


def make_script(
    seed: int,
    *,
    rate_per_min: float,
    duration_s: float,
    kinds: Sequence[FaultKind] = DEFAULT_KINDS,
    roles: Sequence[str] = DEFAULT_ROLES,
) -> list[Fault]:
    """Return faults at random times, so many a minute on average. Equal arguments give equal scripts."""
    draw = random.Random(f"forge chaos {seed}")
    faults: list[Fault] = []
    at_s = draw.expovariate(rate_per_min / 60)
    while at_s < duration_s:
        kind = draw.choice(list(kinds))
        longest = _MAX_DURATION_S.get(kind, 0.0)
        lasts = draw.uniform(0.2, 1.0) * longest if kind != "clock" else draw.choice((-1, 1)) * draw.uniform(60, 86_400)
        role, pick = draw.choice(list(roles)), draw.randrange(1 << 16)
        faults.append(Fault(kind, role, at_s=round(at_s, 3), pick=pick, duration_s=round(lasts, 3)))
        at_s += draw.expovariate(rate_per_min / 60)
    return faults


def periodic_kills(every_s: Mapping[str, float], *, duration_s: float) -> list[Fault]:
    """Return kills of each role every so many seconds."""
    kills = [
        Fault("kill", role, at_s=number * seconds, pick=number)
        for role, seconds in every_s.items()
        for number in range(1, math.ceil(duration_s / seconds))
    ]
    return sorted(kills, key=lambda fault: (fault.at_s or 0.0, fault.role))


def write_script(faults: Sequence[Fault], path: Path) -> None:
    """Write a script, one fault a line."""
    lines = ({name: value for name, value in asdict(fault).items() if value is not None} for fault in faults)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def read_script(path: Path) -> list[Fault]:
    """Read a script. `DataError` names the line that is not a fault."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the script of faults cannot be read: {error}",
            path="--script",
            value=str(path),
            rule="a file of JSON lines, as `forge chaos` writes it",
            repair="check the path",
        ) from None
    return [_fault(line, where=f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]


def _fault(line: str, *, where: str) -> Fault:
    try:
        fields: dict[str, Any] = json.loads(line)
        return Fault(**fields)
    except (ValueError, TypeError) as error:
        raise DataError(
            f"a line of the script is not a fault: {error}",
            path=where,
            value=line[:200],
            rule='{"kind", "role", "at_s" or "at_step", "pick", "duration_s"}, with a kind of '
            f"{', '.join(FAULT_KINDS)}",
            repair="correct the line",
        ) from None
