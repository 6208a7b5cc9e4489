"""A console that is not read, or that cannot show everything, does not hold up or end a run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from forge.observe.notebook.start import StartDisplay
from forge.observe.phases import PhaseEvent
from forge.observe.printing import MAX_WAITING, Printer, printable
from forge.observe.startup import StartUp
from forge.observe.terminal import without_controls
from panel_runs import Terminal

LIMIT_S = 600
NUM_STEPS = 3000
UNREAD = f"""
import logging, os, sys
from forge.observe import ConsoleSink, start_logging
from forge.observe.monitor import monitored

start_logging("info")
log = logging.getLogger("forge.test")
with monitored() as monitor:
    monitor.begin_steps(step=0, total={NUM_STEPS})
    sink = ConsoleSink(log_interval=1, total_steps={NUM_STEPS})
    for step in range(1, {NUM_STEPS} + 1):
        sink.write(step, {{"train/loss": 1.0, "train/learning_rate": 1e-4}})
        monitor.started()
        if step % 10 == 0:
            log.warning("step %d, and words that fill a pipe: %s", step, "x" * 100)
    os.write(int(os.environ["GATE"]), b"all steps taken")
    os.read(int(os.environ["WAIT"]), 1)
    sink.close()
"""


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_steps_are_taken_while_nothing_reads_the_console(kind: str) -> None:
    """As after Ctrl-S, in a pager, or on a terminal whose program is stopped."""
    seen, gate = os.pipe()
    waits, let = os.pipe()
    master, slave = os.openpty() if kind == "terminal" else os.pipe()
    environ = {**os.environ, "GATE": str(gate), "WAIT": str(waits), "TERM": "xterm"}
    for name in ("CI", "FORGE_LOG", "FORGE_VERBOSITY"):
        environ.pop(name, None)
    streams = dict.fromkeys(("stdout", "stderr"), slave)
    command = [sys.executable, "-c", UNREAD]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, **streams, env=environ, pass_fds=[gate, waits])
    for fd in (slave, gate, waits):
        os.close(fd)
    try:
        assert os.read(seen, 100) == b"all steps taken"
        reader = threading.Thread(target=_drain, args=(master, output := bytearray()))
        reader.start()
        os.write(let, b".")
        assert process.wait(timeout=LIMIT_S) == 0
        reader.join(LIMIT_S)
    finally:
        process.kill()
        process.wait()
        for fd in (seen, let, master):
            os.close(fd)
    text = output.decode()
    assert f"Step 1/{NUM_STEPS} | " in text, "what was printed before is not lost"
    steps = [int(step) for step in re.findall(rf"Step (\d+)/{NUM_STEPS} \|", text)]
    assert steps == sorted(steps)
    assert len(steps) < NUM_STEPS, "the console was read all the time: this shows nothing"
    assert steps[-1] == NUM_STEPS, "the newest lines appear when it is read again"


def _drain(descriptor: int, output: bytearray) -> None:
    while True:
        try:
            data = os.read(descriptor, 1 << 16)
        except OSError:  # the other end of a terminal is closed
            return
        if not data:
            return
        output += data


def test_calls_are_made_in_order_and_their_errors_are_raised() -> None:
    printer, made = Printer(patience_s=LIMIT_S), []
    printer.make(lambda: made.append(1))
    printer.make(lambda: printer.make(lambda: made.append(2)))
    assert made == [1, 2]
    with pytest.raises(BrokenPipeError, match="nothing reads"):
        printer.make(lambda: _raise(BrokenPipeError("nothing reads this")))
    printer.make(lambda: made.append(3))
    assert made == [1, 2, 3]


def _raise(error: Exception) -> None:
    raise error


def test_what_waits_is_bounded_and_printed_when_the_console_is_read_again() -> None:
    printer, gate, made = Printer(patience_s=0.001), threading.Event(), []
    printer.make(gate.wait)
    for number in range(3 * MAX_WAITING):
        printer.make(lambda number=number: made.append(number))
    assert made == []
    assert not printer.drain(0.001)
    gate.set()
    assert printer.drain(LIMIT_S)
    assert made == list(range(2 * MAX_WAITING, 3 * MAX_WAITING))
    patient = Printer(patience_s=LIMIT_S)
    patient.make(lambda: made.clear())
    assert made == []


def test_a_forked_child_prints_with_a_thread_of_its_own() -> None:
    printer = Printer(patience_s=LIMIT_S)
    printer.make(lambda: None)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        printer.make(lambda: os.write(writing, b"printed"))
        os._exit(0)
    os.close(writing)
    assert os.read(reading, 100) == b"printed"
    os.close(reading)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("plain, tabs\tand ünïcode", "plain, tabs\tand ünïcode"),
        ("\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m\x1b[0m"),
        ("a\x1b[2J\x1b[1;1Hb\x1b[?25lc", "abc"),
        ("\x1b]0;a title\x07x\x1b]8;;http://a\x1b\\y", "xy"),
        ("\x1b(Bx\x1bcy\x9b2Jz\x07\x00", "Bxy2Jz"),
        (" 10%\r 50%\r100%\r", "100%"),
        ("cut \x1b[", "cut "),
    ],
)
def test_what_processes_print_does_not_change_the_terminal(line: str, shown: str) -> None:
    assert without_controls(line) == shown


def test_what_an_encoding_does_not_have_is_escaped(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w", encoding="latin-1") as stream:
        assert printable("höher ×2 → 3 ✓", stream) == "höher ×2 \\u2192 3 \\u2713"
    program = """
from forge.observe import ConsoleSink
sink = ConsoleSink(log_interval=1)
sink.write(1, {"evaluation/reward": 0.5, "evaluation/größe✓": 1.0})
sink.close()
"""
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, check=False, timeout=100)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert ended.stdout == b"Evaluation at step 1 | reward 0.50 | gr\\xf6\\xdfe\\u2713 1.00\n"


def test_json_records_are_json_in_every_encoding() -> None:
    program = "from forge.observe import start_logging; start_logging(); import logging; logging.warning('größe ✓')"
    environ = {**os.environ, "PYTHONIOENCODING": "latin-1", "FORGE_LOG_FORMAT": "json"}
    ended = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, check=True, timeout=100)
    assert json.loads(ended.stderr.decode("latin-1"))["message"] == "größe ✓"


def test_a_line_is_printed_above_a_panel_as_it_is() -> None:
    terminal = Terminal(
        "from forge.observe.monitor import monitored\nfrom forge.observe.terminal import print_above\n"
        "with monitored():\n    print_above('a:key:b [red]c[/red] :warning:')\nprint('the end')"
    )
    code, lines = terminal.end()
    assert (code, lines) == (0, ["a:key:b [red]c[/red] :warning:", "the end"])


class Cell:
    """Stands for a cell's output."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.shown: list[tuple[str, str]] = []

    def show(self, html: str, text: str) -> None:
        if self.error is not None:
            raise self.error
        self.shown.append((html, text))


def test_a_notebook_shows_the_start_in_one_place() -> None:
    now = iter([0.0, *[12.0] * 20])
    startup, cell = StartUp(clock=lambda: next(now)), Cell()
    display = StartDisplay(startup, output=cell, refresh_s=0)
    for process, done in (("generator-0", 3.0), ("generator-1", 1.0)):
        startup.take(PhaseEvent(process, 1, "loading weights", "progress", 2.0, done, 4.0, "B"))
    startup.take(PhaseEvent("controller", 1, "<b>", "begun", 0.0))
    display.show()
    display.end("Started in 12.0 s")
    display.end("The run ended")
    display.show()
    texts = [text for _, text in cell.shown]
    assert texts == ["Starting 0:12", "Starting 0:12: generator loading weights 25%, <b>", "Started in 12.0 s"]
    assert cell.shown[1][0] == "<div>Starting 0:12: generator loading weights 25%, &lt;b&gt;</div>"


def test_a_notebook_that_has_gone_does_not_end_a_run(caplog: pytest.LogCaptureFixture) -> None:
    display = StartDisplay(StartUp(), output=Cell(OSError("no front end")), refresh_s=0)
    display.show()
    display.end("Started in 1 s")
    (message,) = caplog.messages
    assert message == "the start is no longer shown in the notebook: OSError: no front end"


def test_quiet_is_silent_and_shows_errors(tmp_path: Path) -> None:
    program = """
import logging
from forge.observe import ConsoleSink, start_logging
from forge.observe.monitor import monitored
start_logging("warning")
with monitored() as monitor:
    sink = ConsoleSink(log_interval=1)
    sink.write(1, {"train/loss": 1.0, "validation/loss": 1.0})
    monitor.started()
    logging.getLogger("forge").warning("a warning")
    logging.getLogger("forge").error("an error")
    sink.close()
"""
    environ = {**os.environ, "FORGE_VERBOSITY": "-1"}
    ended = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "ERROR forge: an error\n")
