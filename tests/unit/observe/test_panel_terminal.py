"""The panel as a user sees it: programs on terminals that are emulated."""

from __future__ import annotations

import os
import re
import signal

import pytest

from forge.observe.live_rows import num_broken
from panel_runs import RUN, Terminal

START = f"""
{RUN}
start_logging("info")
with monitored() as monitor:
    with phase("reading model and data"):
        told("data")
    monitor.begin_steps(step=0, total=200)
    for name in ("trainer-0", "generator-0", "generator-1", "rewards-0"):
        event(name, 1, "starting", "begun")
    told("starting")
    for name in ("trainer-0", "generator-0", "generator-1", "rewards-0"):
        event(name, 1, "starting", "done", 0.5)
    event("trainer-0", 2, "loading weights", "begun", 0.0, 0.0, 2.8e9, "B")
    event("trainer-0", 2, "loading weights", "progress", 0.5, 1.204e9, 2.8e9, "B")
    for number in (0, 1):
        event(f"generator-{{number}}", 2, "capturing graphs", "begun", 0.0, 0.0, 8)
        event(f"generator-{{number}}", 2, "capturing graphs", "progress", 0.5, 3.0 + number, 8)
    log.warning("a record of a log")
    told("weights")
    event("trainer-0", 2, "loading weights", "done", 1.25, 2.8e9, 2.8e9, "B")
    for number in (0, 1):
        event(f"generator-{{number}}", 2, "capturing graphs", "done", 0.5, 8.0, 8)
    sink = ConsoleSink(log_interval=10, total_steps=200)
    monitor.started()
    for step in range(1, 31):
        monitor.do("waiting for rollouts: 3 of 16 groups")
        sink.write(step, STEP)
    monitor.lose("generator-1")
    sink.write(30, {{"evaluation/reward": 0.71}})
    print("printed by the program")
    print("to standard error", file=sys.stderr)
    told("steps")
    sink.close()
print("the end")
"""


def at_foot(lines: list[str], first: str) -> list[str]:
    """The rows from the last one that begins so."""
    places = [number for number, line in enumerate(lines) if line.startswith(first)]
    return lines[places[-1] :] if places else []


def no_clocks(rows: list[str]) -> list[str]:
    return [re.sub(r"\d+:\d\d", "0:00", row) for row in rows]


def shown(terminal: Terminal, rows: list[str]) -> list[str]:
    """Wait until these are the rows at the foot, whatever their clocks say; return all lines of the screen."""
    return terminal.until(lambda lines: no_clocks(at_foot(lines, rows[0][:8])) == rows)


def test_a_run_is_shown_from_its_start_to_its_end() -> None:
    terminal = Terminal(START)
    terminal.until("seen data")
    shown(terminal, ["starting 0:00", "  run  reading model and data  0:00"])
    assert terminal.is_cursor_shown, "kill -9 could not bring it back"
    terminal.go()
    starting = ["  trainer       starting  0:00", "  generator ×2  starting  0:00", "  rewards       starting  0:00"]
    shown(terminal, ["starting 0:00  step 0/200", *starting])
    terminal.go()
    rows = [
        "starting 0:00  step 0/200",
        "  trainer       loading weights 43%   ━━━━━━────────── 1.2/2.8 GB  0:00",
        "  generator ×2  capturing graphs 3/8  ━━━━━━──────────  0:00",
        "  ready: rewards",
    ]
    assert "WARNING forge.test: a record of a log" in shown(terminal, rows)
    terminal.go()
    terminal.until("seen steps")
    rows = [
        "step 30/200 ━━━─────────────────────  15% 0:00, 0:00 left",
        "reward 0.75 " + "▁" * 20 + "  evaluation 0.71 @30  KL 0.12  entropy 1.2345",
        "staleness 0.5  gen 1.23k tok/s  train 5.68k tok/s",
        "time 8.0 s ░░▓▓▓▓▓▓▓▓▓▓▓▓████████▒  wait 10% gen 50% train 30% sync 5%",
        "now 0:00 waiting for rollouts: 3 of 16 groups",
        "faults generator lost 1",
    ]
    lines = shown(terminal, rows)
    assert [line for line in lines if line.startswith("Started in ")]
    assert {"printed by the program", "to standard error"} <= set(lines)
    assert [line[:12] for line in lines if line.startswith("Step ")] == ["Step 10/200 ", "Step 20/200 ", "Step 30/200 "]
    code, lines = terminal.end()
    assert code == 0
    assert terminal.is_cursor_shown
    assert lines[-1] == "the end"
    assert sum(line.startswith("step 30/200") for line in lines) == 1, "the last state stays, once"
    assert not any(line.startswith("now ") for line in lines)


@pytest.mark.parametrize("columns", [20, 40, 79, 200])
def test_rows_and_lines_are_as_wide_as_the_terminal(columns: int) -> None:
    """Every step's line is one line of the screen: nothing wraps."""
    terminal = Terminal(START, columns=columns)
    code, lines = terminal.end()
    assert code == 0
    assert [line.partition(" | ")[0] for line in lines if line.startswith("Step ")] == [
        *("Step 10/200", "Step 20/200", "Step 30/200")
    ]
    rows = at_foot(lines, "step 30/200")
    assert rows[-1] == "the end"
    assert len(rows) <= 7


def test_the_panel_follows_a_terminal_whose_size_changes() -> None:
    terminal = Terminal(START, columns=120)
    for seen in ("data", "starting", "weights"):
        terminal.until(f"seen {seen}")
        terminal.go()
    terminal.until("faults generator lost 1")
    terminal.resize(40)
    rows = terminal.until(lambda lines: any(line.startswith("evaluation 0.71 @30") for line in lines))
    assert all(len(row) <= 40 for row in at_foot(rows, "step 30/200"))
    terminal.resize(100)
    rows = at_foot(terminal.until(lambda lines: "sync 5%" in " ".join(lines[-4:])), "step 30/200")
    assert max(map(len, rows)) > 60
    assert terminal.end()[0] == 0
    assert terminal.is_cursor_shown


def test_rows_that_a_narrower_terminal_breaks_are_erased_whole() -> None:
    assert num_broken([80, 70, 10], width=100) == 0
    assert num_broken([80, 70, 10], width=40) == 2
    assert num_broken([80, 70, 10], width=30) == 4
    assert num_broken([], width=1) == 0


RAISES = START.replace('told("weights")', 'raise RuntimeError("the run broke")')
RUNS = START.replace("sink.close()", 'raise RuntimeError("the run broke")')
EXITS = START.replace("sink.close()", "raise SystemExit(7)")


@pytest.mark.parametrize(("program", "exit_code"), [(RAISES, 1), (RUNS, 1), (EXITS, 7)])
def test_the_terminal_is_as_it_was_however_the_program_ends(program: str, exit_code: int) -> None:
    terminal = Terminal(program)
    code, lines = terminal.end()
    assert code == exit_code
    assert terminal.is_cursor_shown
    assert ("RuntimeError: the run broke" in lines) == (exit_code == 1)
    if program is RAISES:
        assert not any(line.startswith("starting") for line in lines), "what was starting is gone; the error says why"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV])
def test_a_signal_that_ends_the_program_leaves_the_cursor_visible(number: signal.Signals) -> None:
    terminal = Terminal(START)
    terminal.until("starting 0:")
    terminal.process.send_signal(number)
    code, lines = terminal.end()
    assert code == -number
    assert terminal.is_cursor_shown
    assert any(line.startswith("starting") for line in lines), "there was a panel"


def test_ctrl_c_leaves_the_terminal_as_it_was() -> None:
    terminal = Terminal(START)
    terminal.until("seen data")
    os.write(terminal.master, b"\x03")  # the line discipline sends the signal
    os.killpg(terminal.process.pid, signal.SIGINT)  # the terminal is not the controlling one of this session
    code, lines = terminal.end()
    assert code in (130, -signal.SIGINT, 1)
    assert terminal.is_cursor_shown
    assert "KeyboardInterrupt" in lines


def test_no_color_leaves_colors_out_and_ascii_leaves_unicode_out() -> None:
    terminal = Terminal(START, env={"NO_COLOR": "1"})
    terminal.end()
    assert not re.search(rb"\x1b\[(\d+;)*3[0-7]", terminal.raw)
    colored = Terminal(START)
    colored.end()
    assert re.search(rb"\x1b\[(\d+;)*3[0-7]", colored.raw)
    plain = Terminal(START, env={"PYTHONIOENCODING": "ascii", "NO_COLOR": "1"})
    code, lines = plain.end()
    assert code == 0
    assert any("===..." in line for line in lines)
    assert all(ord(letter) < 128 for line in lines for letter in line)


@pytest.mark.parametrize(
    ("env", "has_lines", "num_steps"),
    [
        ({"TERM": "dumb"}, True, 3),
        ({"CI": "true"}, True, 3),
        ({"FORGE_VERBOSITY": "-1"}, False, 0),
        ({"FORGE_LOG_FORMAT": "json"}, False, 3),
    ],
)
def test_a_dumb_terminal_gets_lines_and_who_wants_less_gets_less(
    env: dict[str, str], has_lines: bool, num_steps: int
) -> None:
    terminal = Terminal(START, env=env, columns=80, rows=60)
    code, lines = terminal.end()
    assert code == 0
    assert b"\x1b[?25l" not in terminal.raw
    assert any(line.startswith("Start 0:") for line in lines) == has_lines
    assert any(line.startswith("Started in ") for line in lines) == has_lines
    assert sum(line.startswith("Step ") for line in lines) == num_steps
