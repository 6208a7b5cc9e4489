"""The rows of the panel at the foot of a terminal. Pure functions: what is known, and how wide the terminal is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from forge.observe.lines import format_part, format_seconds, time_shares
from forge.observe.sink import (
    ENTROPY,
    EVALUATION_REWARD,
    GENERATION_TOKENS_PER_S,
    GRAD_NORM,
    KL,
    LEAGUE_ELO,
    LEAGUE_WIN_RATE,
    LEARNING_RATE,
    MEMORY_GIB,
    MFU,
    REWARD_MEAN,
    STALENESS,
    STEP_TIME,
    TOKENS_PER_S,
    TRAIN_LOSS,
    VALIDATION_LOSS,
    Value,
)
from forge.observe.startup import CONTROLLER, StartPhase, kind_of
from forge.observe.step_lines import format_clock, format_count, format_short, format_step

if TYPE_CHECKING:
    from rich.text import Text

MAX_WIDTH: Final = 100
"""A wider panel is no better to read, and a terminal that is made narrower breaks fewer of its rows."""
_MAX_KINDS: Final = 6
_BARS: Final = "▁▂▃▄▅▆▇█"
_PLAIN_BARS: Final = "_.-~=+*#"
_GLYPHS: Final = {"wait": "░", "gen": "▓", "train": "█", "sync": "▒", "other": " "}
_PLAIN_GLYPHS: Final = {"wait": ".", "gen": "g", "train": "#", "sync": "s", "other": " "}
_STYLES: Final = {"wait": "yellow", "gen": "cyan", "train": "green", "sync": "magenta", "other": "dim"}
_MADE: Final = {"B": ("GB", 1e9), "": ("", 1.0)}


@dataclass(slots=True)
class PanelState:
    """What a panel shows.

    Attributes:
        total: the last step; None where that is not known.
        first: the step that the run starts after.
        values: the metrics of the last step.
        history: its reward, or its loss, and those of the steps before it.
        evaluation: the last evaluation: its step, and what was found.
        phases: what processes are doing while the run starts, or a process is started again.
        ended: kinds of processes that have nothing more to do for the start.
        activity: what the run does or waits for, and since when.
        faults: how often something was lost, by what it was.
        is_over: whether this is what stays on the terminal.
    """

    total: int | None = None
    first: int = 0
    step: int = 0
    elapsed_s: float = 0.0
    left_s: float | None = None
    is_starting: bool = False
    values: Mapping[str, Value] = field(default_factory=dict)
    history: Sequence[float] = ()
    evaluation: tuple[int, float] | None = None
    phases: Sequence[StartPhase] = ()
    ended: Sequence[str] = ()
    activity: tuple[str, float] | None = None
    faults: Mapping[str, int] = field(default_factory=dict)
    is_over: bool = False


def rows_of(state: PanelState, *, width: int, is_ascii: bool) -> list[Text]:
    """Return the rows, none of them longer than `width`."""
    width = min(width, MAX_WIDTH)
    if state.is_over and (state.is_starting or not state.values):
        return []  # what has ended the start is printed below, and a program without steps has none to show
    if state.is_starting:
        rows = [_start_row(state), *_phase_rows(state, width=width, is_ascii=is_ascii)]
    else:
        rows = [_progress_row(state, width=width, is_ascii=is_ascii)]
        rows += _metric_rows(state, width=width, is_ascii=is_ascii)
        if time_shares(state.values):
            rows.append(_time_row(state.values, width=width, is_ascii=is_ascii))
        rows += _now_rows(state)
    for row in rows:
        if row.cell_len > width:
            row.truncate(width, overflow="crop" if is_ascii else "ellipsis")
        row.no_wrap, row.overflow = True, "crop"
    return rows


def sparkline(values: Sequence[float], *, width: int, is_ascii: bool) -> str:
    """Return a curve of so many characters: neighbouring values are averaged where there are more."""
    finite = [value for value in values if value - value == 0.0]
    if not finite or width < 1:
        return ""
    size = max(1.0, len(finite) / width)
    count = min(len(finite), width)
    parts = [finite[int(place * size) : max(int(place * size) + 1, int((place + 1) * size))] for place in range(count)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    bars = _PLAIN_BARS if is_ascii else _BARS
    return "".join(bars[int((mean - low) / (high - low) * 7.999) if high > low else 0] for mean in means)


def bar(part: float, *, width: int, is_ascii: bool) -> Text:
    """Return a bar that is full at 1."""
    from rich.text import Text

    full = min(width, int(width * max(0.0, part) + 1e-9))
    text = Text().append(("=" if is_ascii else "━") * full, style="green")
    return text.append(("." if is_ascii else "─") * (width - full), style="dim")


# ---- While the run starts


def _start_row(state: PanelState) -> Text:
    from rich.text import Text

    row = Text().append("starting", style="bold").append(f" {format_clock(state.elapsed_s)}", style="dim")
    if state.total:
        row.append(f"  step {format_step(state.step, state.total)}", style="dim")
    return row


def _phase_rows(state: PanelState, *, width: int, is_ascii: bool) -> list[Text]:
    """Return a row for each kind of process: what the slowest of them is doing, and how many are."""
    kinds: dict[str, list[StartPhase]] = {}
    for phase in state.phases:
        kinds.setdefault(kind_of(phase.process), []).append(phase)
    order = sorted(kinds, key=lambda kind: min(phase.start_s for phase in kinds[kind]))
    names = {kind: _kind_name(kind, len(kinds[kind])) for kind in order}
    chosen = {kind: slowest(kinds[kind]) for kind in order[:_MAX_KINDS]}
    name_room = max([len(names[kind]) for kind in chosen], default=0)
    text_room = max([len(phase_text(phase)) for phase in chosen.values()], default=0)
    rooms = name_room, min(text_room, 30)
    rows = [_phase_row(names[kind], phase, rooms, width=width, is_ascii=is_ascii) for kind, phase in chosen.items()]
    if len(order) > _MAX_KINDS:
        rows.append(_dim(f"  and {len(order) - _MAX_KINDS} more"))
    waiting = [kind for kind in state.ended if kind not in kinds and kind != CONTROLLER]
    if waiting:
        rows.append(_dim(f"  ready: {', '.join(waiting)}"))
    return rows


def _kind_name(kind: str, number: int) -> str:
    name = "run" if kind == CONTROLLER else kind
    return name if number == 1 else f"{name} ×{number}"


def slowest(phases: Sequence[StartPhase]) -> StartPhase:
    """Return the phase that is least far, or began last where that is not known."""
    return min(phases, key=lambda phase: (phase.part if phase.part is not None else -1.0, -phase.start_s))


def phase_text(phase: StartPhase) -> str:
    """`loading weights 43%`, `capturing graphs 3/8`, or the name alone."""
    part = phase.part
    if part is None:
        return phase.name
    return f"{phase.name} {part:.0%}" if phase.unit else f"{phase.name} {phase.done:.0f}/{phase.total:.0f}"


def _phase_row(name: str, phase: StartPhase, rooms: tuple[int, int], *, width: int, is_ascii: bool) -> Text:
    from rich.text import Text

    name = (name.replace("×", "x") if is_ascii else name).ljust(rooms[0])
    row = Text().append(f"  {name}  ", style="cyan").append(phase_text(phase))
    clock = f"  {format_clock(phase.seconds)}"
    part = phase.part
    if part is not None and width >= 60:
        row.pad_right(max(0, len(name) + 4 + rooms[1] - row.cell_len))
        row.append("  ").append(bar(part, width=16, is_ascii=is_ascii))
        unit, size = _MADE.get(phase.unit, (phase.unit, 1.0))
        if phase.unit:
            amounts = f"{phase.done / size:.1f}/{phase.total / size:.1f} {unit}"
            row.append(f" {amounts}", style="dim")
    return row.append(clock, style="dim")


def _dim(text: str) -> Text:
    from rich.text import Text

    return Text(text, style="dim")


# ---- While the run runs


def _progress_row(state: PanelState, *, width: int, is_ascii: bool) -> Text:
    from rich.text import Text

    row = Text().append(f"step {format_step(state.step, state.total)}", style="bold")
    times = f" {format_clock(state.elapsed_s)}"
    if state.left_s is not None:
        left = f"{format_clock(state.left_s)} left"
        times = f"{times}, {left}" if width >= 60 else f" {left}"
    if state.total:
        part = state.step / state.total
        room = min(24 if width < 90 else 36, width - row.cell_len - len(times) - 6)
        if room >= 4:
            row.append(" ").append(bar(part, width=room, is_ascii=is_ascii))
        row.append(f" {min(1.0, part):4.0%}")
    return row.append(times, style="dim")


def _metric_rows(state: PanelState, *, width: int, is_ascii: bool) -> list[Text]:
    """Return the reward or the loss with its curve, and then what else is known, in as many rows as it takes."""
    from rich.text import Text

    values = state.values
    shown = next((name for name in (REWARD_MEAN, TRAIN_LOSS) if name in values), None)
    if shown is None:
        return []
    first = Text().append("reward " if shown == REWARD_MEAN else "loss ", style="dim")
    first.append(format_short(float(values[shown])), style="bold")
    curve = sparkline(state.history, width=min(24, max(8, width // 4)), is_ascii=is_ascii)
    if len(state.history) > 1:
        first.append(f" {curve}", style="cyan")
    rows = [first]
    for name, text in _metrics(state):
        field = Text().append(f"{name} ", style="dim").append(text, style="bold")
        if rows[-1].cell_len + 2 + field.cell_len > width and len(rows) < 2:
            rows.append(field)
        else:
            rows[-1].append("  ").append(field)
    return rows


def _metrics(state: PanelState) -> list[tuple[str, str]]:
    """Return the metrics besides reward and loss: what each is called, and how it reads."""
    values, found = state.values, []
    if state.evaluation is not None:
        step, value = state.evaluation
        name = "evaluation" if REWARD_MEAN in values else "validation"
        found.append((name, f"{format_short(value)} @{step}"))
    is_rollout = REWARD_MEAN in values
    for name, text, show in (
        (KL, "KL", format_short),
        (ENTROPY, "entropy", format_short),
        (LEAGUE_ELO, "Elo", lambda value: f"{value:.0f}"),
        (LEAGUE_WIN_RATE, "win", lambda value: f"{value:.0%}"),
        (LEARNING_RATE, "lr" if not is_rollout else "", lambda value: f"{value:.3g}"),
        (STALENESS, "staleness", lambda value: f"{value:.3g}"),
        (GENERATION_TOKENS_PER_S, "gen", lambda value: f"{format_count(value)} tok/s"),
        (TOKENS_PER_S, "train" if is_rollout else "speed", lambda value: f"{format_count(value)} tok/s"),
        (GRAD_NORM, "grad" if not is_rollout else "", format_short),
        (MEMORY_GIB, "memory", lambda value: f"{value:.1f} GiB"),
        (MFU, "MFU", format_part),
    ):
        if name in values and text:
            found.append((text, show(float(values[name]))))
    return found


def _time_row(values: Mapping[str, Value], *, width: int, is_ascii: bool) -> Text:
    """Return a bar in which each glyph is a part of the step's time, and what it stands for."""
    from rich.text import Text

    shares = list(time_shares(values).items())
    glyphs = _PLAIN_GLYPHS if is_ascii else _GLYPHS
    row = Text().append("time ", style="dim")
    if STEP_TIME in values:
        row.append(f"{format_seconds(float(values[STEP_TIME]))} ", style="bold")
    room, drawn, reached = 24 if width >= 60 else 0, 0, 0.0
    for name, part in [*shares, ("other", 1.0)]:
        reached = min(1.0, reached + part)
        size = round(reached * room) - drawn
        row.append(glyphs[name] * size, style=_STYLES[name])
        drawn += size
    for name, part in shares:
        row.append(f" {name} ", style=_STYLES[name]).append(f"{part:.0%}")
    return row


def _now_rows(state: PanelState) -> list[Text]:
    """Return what the run does or waits for, what processes that start are doing, and what was lost."""
    from rich.text import Text

    rows = []
    if not state.is_over:  # always there, so that the panel does not change its height at every step
        what, since_s = state.activity or ("between two steps", 0.0)
        rows.append(Text().append("now ", style="dim").append(f"{format_clock(since_s)} ", style="dim").append(what))
    rows += [Text().append(f"  {each.process} ", style="cyan").append(phase_text(each)) for each in state.phases[:2]]
    lost = [f"{what} {count}" for what, count in state.faults.items() if count]
    if lost:
        rows.append(Text().append("faults ", style="red").append(", ".join(lost)))
    return rows


def evaluated(values: Mapping[str, Value]) -> float | None:
    """Return what an evaluation or a validation found, if these are the metrics of one."""
    name = next((name for name in (EVALUATION_REWARD, VALIDATION_LOSS) if name in values), None)
    return None if name is None else float(values[name])
