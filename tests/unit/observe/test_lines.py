"""What whoever watches a run of reinforcement learning sees."""

from __future__ import annotations

import codecs
import errno
import io
import os
import re
import subprocess
import sys
import termios
from collections.abc import Mapping
from typing import Any

import pytest
from rich.console import Console, Group

from forge.observe import ConsoleSink, Value
from forge.observe.displays import EpisodePanel, panel_rows
from forge.observe.lines import evaluation_line, rollout_line, time_shares

STEP: dict[str, Value] = {
    "train/loss": 0.01,
    "rollout/reward_mean": 0.75,
    "train/kl": 0.12,
    "train/entropy": 1.2345,
    "rollout/staleness_mean": 0.5,
    "rollout/tokens_per_s": 1234.4,
    "train/tokens_per_s": 5678.0,
    "time/step": 8.0,
    "time/waiting": 0.8,
    "time/generating": 4.0,
    "time/training": 2.4,
    "time/syncing": 0.4,
    "time/other": 0.4,
}
WHOLE = (
    "Step 1 | Avg Reward: 0.75 | KL Divergence: 0.12 | Entropy: 1.2345 | Staleness: 0.5 | Gen: 1234 tok/s"
    " | Train: 5678 tok/s | Time: 8.0 s (wait 10%, gen 50%, train 30%, sync 5%)"
)
EVALUATION: dict[str, Value] = {
    "evaluation/reward": 0.71,
    "evaluation/pass@8": 0.93,
    "evaluation/avg@8": 0.7,
    "evaluation/length": 34.2,
    "evaluation/num_prompts": 64,
}


def printed(writes: list[tuple[int, Mapping[str, Value]]], **options: Any) -> list[str]:
    stream = io.StringIO()
    sink = ConsoleSink(stream=stream, **options)
    for step, values in writes:
        sink.write(step, values)
    sink.close()
    return stream.getvalue().splitlines()


def test_the_line_is_the_one_that_was_promised() -> None:
    short: dict[str, Value] = {"rollout/reward_mean": 0.75, "train/kl": 0.12}
    assert printed([(1, short)], log_interval=1) == ["Step 1 | Avg Reward: 0.75 | KL Divergence: 0.12"]
    assert rollout_line(1, STEP) == WHOLE


def test_what_is_not_known_is_not_there() -> None:
    without_kl = {name: value for name, value in STEP.items() if name != "train/kl"}
    assert rollout_line(7, without_kl) == WHOLE.replace("Step 1", "Step 7").replace(" | KL Divergence: 0.12", "")
    assert rollout_line(7, {"rollout/reward_mean": -1.5}) == "Step 7 | Avg Reward: -1.50"


def test_what_went_wrong_is_said() -> None:
    values: dict[str, Value] = {"rollout/reward_mean": float("nan"), "rollout/num_failed": 2.0, "train/skipped": 1}
    assert rollout_line(7, values) == "Step 7 | Avg Reward: nan | Failed: 2 | skipped"
    assert rollout_line(7, {"rollout/reward_mean": 0, "rollout/num_failed": 0.0}) == "Step 7 | Avg Reward: 0.00"


def test_the_time_is_split_over_the_whole_step() -> None:
    assert time_shares({"time/step": 4.0, "time/waiting": 1.0}) == {"wait": 0.25}
    assert time_shares({"time/waiting": 1.0, "time/training": 3.0}) == {"wait": 0.25, "train": 0.75}
    overlapping: dict[str, Value] = {"time/step": 2.0, "time/generating": 3.0, "time/training": 1.0}
    assert time_shares(overlapping) == {"gen": 0.75, "train": 0.25}
    assert time_shares({}) == {}
    assert time_shares({"time/step": 0.0, "time/waiting": 0.0}) == {}
    assert time_shares({"time/step": float("nan"), "time/waiting": float("inf")}) == {}


def test_an_evaluation_is_printed_whenever_it_comes() -> None:
    line = "Evaluation at step 3 | reward 0.71 | pass@8 0.93 | avg@8 0.70 | length 34.20 | 64 prompts"
    assert evaluation_line(3, EVALUATION) == line
    assert printed([(3, EVALUATION)], log_interval=50) == [line]
    assert printed([(4, {**STEP, **EVALUATION})], log_interval=4)[1] == line.replace("3", "4", 1)


def test_lines_come_at_the_interval_and_at_the_end() -> None:
    writes = [(step, {"rollout/reward_mean": 1.0, "train/loss": 2.0}) for step in range(1, 12)]
    lines = printed(writes, log_interval=4, total_steps=11)
    assert lines == [f"Step {step} | Avg Reward: 1.00" for step in (4, 8, 11)]


def test_a_pipe_gets_lines_alone_even_if_progress_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for progress in (None, True):
        sink = ConsoleSink(log_interval=1, total_steps=2, progress=progress)
        sink.write(1, STEP)
        sink.write(2, STEP)
        sink.close()
        seen = capsys.readouterr()
        assert seen.out == WHOLE + "\n" + WHOLE.replace("Step 1", "Step 2") + "\n"
        assert "reward" not in seen.err


# ---- the panel


def rows(values: Mapping[str, Value], *, width: int = 120, **options: Any) -> list[str]:
    console = Console(file=io.StringIO(), width=width, **options)
    console.print(Group(*panel_rows((4, 6, 8), values, elapsed_s=3725.0, console=console)))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_the_panel_shows_progress_figures_and_time() -> None:
    assert rows(STEP) == [
        "step 6/8 " + "━" * 18 + "─" * 6 + " 1:02:05, 1:02:05 left",
        "reward 0.75  KL 0.12  entropy 1.2345  staleness 0.5  gen tok/s 1234  train tok/s 5678",
        "time 8.0 s " + "░░" + "▓" * 12 + "█" * 8 + "▒" + "  wait 10% gen 50% train 30% sync 5%",
    ]


def test_the_panel_shows_what_there_is() -> None:
    console = Console(file=io.StringIO(), width=80)
    (row,) = panel_rows((0, 0, None), {}, elapsed_s=5.0, console=console)
    assert row.plain == "step 0 0:05"


@pytest.mark.parametrize("width", [1, 2, 7, 20, 40, 79, 200])
def test_rows_never_wrap(width: int) -> None:
    found = rows(STEP, width=width, force_terminal=True, color_system=None)
    assert len(found) == 3
    assert all(len(row) <= width for row in found)


def test_a_terminal_without_unicode_gets_letters() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(file=stream, width=60)
    console.print(Group(*panel_rows((4, 6, 8), STEP, elapsed_s=1.0, console=console)))
    stream.flush()
    text = stream.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert "=" * 18 + "." * 6 in text
    assert ".." + "g" * 12 + "#" * 8 in text


PROGRAM = """
import os, sys
from forge.observe import ConsoleSink
gate, mode, values = int(sys.argv[1]), sys.argv[2], eval(sys.argv[3])
sink = ConsoleSink(log_interval=2, total_steps=4)
for step in (1, 2, 3):
    os.read(gate, 1)
    if step == 3 and mode == "error":
        raise RuntimeError("the run broke")
    sink.write(step, values)
    print("seen", step)
if mode == "close":
    sink.close()
    print("the end")
"""


class Terminal:
    """A program on a terminal of its own. `go` lets it make a step and returns what the terminal got meanwhile."""

    def __init__(self, mode: str, *, columns: int = 120) -> None:
        self.master, slave = os.openpty()
        self._decode = codecs.getincrementaldecoder("utf-8")().decode  # a read may end within a character
        self.resize(columns)
        gate, self.gate = os.pipe()
        environment = {**os.environ, "TERM": "xterm-256color", "NO_COLOR": "1"}
        for name in ("COLUMNS", "LINES", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(gate), mode, repr(STEP)],
            **dict.fromkeys(("stdin", "stdout", "stderr"), slave),
            pass_fds=[gate],
            env=environment,
            start_new_session=True,
        )
        os.close(slave)
        os.close(gate)

    def resize(self, columns: int) -> None:
        termios.tcsetwinsize(self.master, (24, columns))

    def go(self, until: str) -> str:
        os.write(self.gate, b".")
        text = ""
        while until not in text:
            text += self._decode(os.read(self.master, 1 << 16))
        return text

    def rest(self) -> str:
        parts = []
        try:
            while part := os.read(self.master, 1 << 16):
                parts.append(part)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
        return self._decode(b"".join(parts), final=True)

    def end(self) -> int:
        os.close(self.gate)
        code = self.process.wait(timeout=600)
        os.close(self.master)
        return code


HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


def plain(text: str) -> list[str]:
    return [row for row in re.split(r"[\r\n]+", re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", text)) if row]


def test_a_terminal_gets_a_panel_which_follows_its_width() -> None:
    terminal = Terminal("close")
    first = terminal.go("seen 1")
    assert HIDE in first
    terminal.resize(30)
    second = terminal.go("seen 2")
    drawn = plain(second)
    number = next(number for number, row in enumerate(drawn) if row.startswith("step 2/4 "))
    assert drawn[number].endswith("…")
    # What comes before may have been drawn before the terminal became narrow.
    assert all(len(row) <= 30 for row in drawn[number:] if row.startswith(("step", "reward", "time")))
    assert "Step 2 | Avg Reward: 0.75 | KL Divergence: 0.12" in second.replace("\r\n", "")
    terminal.resize(8)
    third = terminal.go("seen 3") + terminal.rest()
    assert SHOW in third
    assert plain(third)[-1] == "the end"
    assert terminal.end() == 0


@pytest.mark.parametrize("mode", ["error", "forget"])
def test_the_cursor_comes_back_however_the_program_ends(mode: str) -> None:
    terminal = Terminal(mode)
    terminal.go("seen 1")
    terminal.go("seen 2")
    os.write(terminal.gate, b".")
    last = terminal.rest()
    assert SHOW in last
    assert ("RuntimeError: the run broke" in last) == (mode == "error")
    assert terminal.end() == (1 if mode == "error" else 0)


def test_the_panel_knows_the_time_that_is_left() -> None:
    now_s = [100.0]
    stream = io.StringIO()
    panel = EpisodePanel(step=2, total_steps=10, stream=stream, clock=lambda: now_s[0], refresh_s=0)
    now_s[0] += 60
    panel.show(4, STEP)
    panel.close()
    panel.close()
    assert "step 4/10" in stream.getvalue(), "what is no terminal gets the last state"
    assert "1:00, 3:00 left" in stream.getvalue()


def test_other_tools_may_read_episodes_instead_of_steps() -> None:
    assert rollout_line(7, {"rollout/reward_mean": 1.0}, word="Episode") == "Episode 7 | Avg Reward: 1.00"
    assert printed([(2, {"rollout/reward_mean": 1.0})], log_interval=1, step_word="Episode") == [
        "Episode 2 | Avg Reward: 1.00"
    ]
