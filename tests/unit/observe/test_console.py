"""What whoever watches a run sees."""

from __future__ import annotations

import errno
import io
import math
import os
import re
import subprocess
import sys
import termios

import pytest

from forge.observe import ConsoleSink, Sink, step_values
from forge.observe.lines import bar_text, format_loss, format_norm, format_rate, format_tokens_per_s, train_line
from forge.types import StepResult

RESULT = StepResult(100, 2.45, 0.53, 1e-4, num_tokens=4096, num_loss_tokens=2048, seconds=0.5)


def printed(sink_of: dict[str, object], writes: list[tuple[int, dict[str, object]]]) -> list[str]:
    stream = io.StringIO()
    sink: Sink = ConsoleSink(stream=stream, **sink_of)  # type: ignore[arg-type]
    for step, values in writes:
        sink.write(step, values)  # type: ignore[arg-type]
    sink.close()
    return stream.getvalue().splitlines()


def test_the_line_is_the_one_that_was_promised() -> None:
    values = {"train/loss": 2.45, "train/learning_rate": 1e-4, "train/epoch": 1}
    assert printed({"num_epochs": 10}, [(100, values)]) == ["Epoch 1/10 | Step 100 | Loss: 2.45 | LR: 0.0001"]


def test_further_fields_follow_in_their_order() -> None:
    values = step_values(RESULT, epoch=3, mfu=0.4512, tokens_per_s=12345.4, memory_gib=12.14)
    expected = (
        "Epoch 3/10 | Step 100 | Loss: 2.45 | LR: 0.0001 | Tokens/s: 12345 | Grad: 0.53 | Mem: 12.1 GiB | MFU: 45.1%"
    )
    assert printed({"num_epochs": 10}, [(100, values)]) == [expected]


def test_what_is_not_known_is_not_there() -> None:
    assert train_line(7, {"train/loss": 1.0}) == "Step 7 | Loss: 1.00"
    assert train_line(7, {"train/loss": 1.0, "train/epoch": 2}) == "Epoch 2 | Step 7 | Loss: 1.00"
    values = step_values(RESULT, tokens_per_s=None, mfu=None)
    assert train_line(7, values) == "Step 7 | Loss: 2.45 | LR: 0.0001 | Grad: 0.53"


def test_a_step_that_was_left_out_says_so() -> None:
    skipped = StepResult(9, math.nan, math.inf, 1e-5, num_tokens=1, num_loss_tokens=1, skipped=True)
    assert train_line(9, step_values(skipped)) == "Step 9 | Loss: nan | LR: 1e-05 | Grad: inf | skipped"


def test_a_validation_is_printed_whenever_it_comes() -> None:
    writes: list[tuple[int, dict[str, object]]] = [
        (99, {"validation/loss": 2.31, "validation/best": True}),
        (101, {"validation/loss": 2.4, "validation/best": False}),
    ]
    assert printed({"log_interval": 50}, writes) == [
        "Validation | Step 99 | Loss: 2.31 | best",
        "Validation | Step 101 | Loss: 2.40",
    ]


def test_lines_come_at_the_interval_and_at_the_end() -> None:
    writes: list[tuple[int, dict[str, object]]] = [(step, {"train/loss": 1.0}) for step in range(1, 12)]
    lines = printed({"log_interval": 4, "total_steps": 11}, writes)
    assert lines == [f"Step {step} | Loss: 1.00" for step in (4, 8, 11)]


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        *[(2.45, "2.45"), (2.4, "2.40"), (2.0, "2.00"), (2.3456, "2.3456"), (2.345678, "2.3457"), (11.9, "11.90")],
        *[(0.0, "0.00"), (0.00012, "0.00012"), (1.234e-7, "1.23e-07"), (-1.5, "-1.50"), (123456.0, "123456.00")],
        *[(math.nan, "nan"), (math.inf, "inf")],
    ],
)
def test_losses_are_readable(loss: float, text: str) -> None:
    assert format_loss(loss) == text


def test_other_numbers_are_readable() -> None:
    assert [format_rate(rate) for rate in (1e-4, 1e-5, 0.0, 3e-4, 2.5e-5)] == [
        "0.0001",
        "1e-05",
        "0",
        "0.0003",
        "2.5e-05",
    ]
    assert [format_norm(norm) for norm in (0.53, 12.0, 0.0012, 0.0)] == ["0.53", "12.00", "0.0012", "0.00"]
    assert [format_tokens_per_s(rate) for rate in (12345.4, 10.0, 1.25)] == ["12345", "10", "1.2"]
    values = {"train/loss": 2.45, "train/learning_rate": 1e-4, "train/tokens_per_s": 12345.4, "train/mfu": 0.4}
    assert bar_text(values) == "loss 2.45, lr 0.0001, 12345 tokens/s"


def on_a_terminal(progress: bool | None) -> str:
    """What a terminal of 120 columns gets to see of three steps, one of them a line."""
    master, slave = os.openpty()
    attributes = termios.tcgetattr(slave)
    attributes[1] &= ~termios.OPOST
    termios.tcsetattr(slave, termios.TCSANOW, attributes)
    termios.tcsetwinsize(slave, (40, 120))
    with open(slave, "w", encoding="utf-8") as stream:
        sink = ConsoleSink(log_interval=2, total_steps=8, resume_step=4, progress=progress, stream=stream)
        for step in (5, 6, 7):
            sink.write(step, {"train/loss": step / 4, "train/learning_rate": 1e-4, "train/tokens_per_s": 100.0 * step})
        sink.close()
    return everything_from(master).decode()


def everything_from(master: int) -> bytes:
    """All that was written to a terminal whose other end is closed. Linux says EIO there, where a pipe would say 0."""
    parts = []
    with open(master, "rb", buffering=0) as reader:
        try:
            while part := reader.read(1 << 16):
                parts.append(part)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
    return b"".join(parts)


def test_a_terminal_gets_a_bar_and_lines_above_it() -> None:
    text = on_a_terminal(None)
    first = text.split("\r")[1]
    assert " 50%|" in first
    assert "4/8 [" in first
    # tqdm wipes the bar, the line takes its place, and the bar is drawn anew below it.
    assert re.search(r"\r +\rStep 6 \| Loss: 1\.50 \| LR: 0\.0001 \| Tokens/s: 600\n\r", text)
    last = text.rstrip("\n").split("\r")[-1]
    assert "7/8 [" in last
    assert re.search(r"\[\d\d:\d\d<\d\d:\d\d,", last), "the time that is left"
    assert "loss 1.75, lr 0.0001, 700 tokens/s" in last


def test_without_a_bar_a_terminal_gets_the_lines_alone() -> None:
    assert on_a_terminal(False) == "Step 6 | Loss: 1.50 | LR: 0.0001 | Tokens/s: 600\n"


def test_a_pipe_gets_no_bar_unless_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for progress in (None, True):
        sink = ConsoleSink(log_interval=1, total_steps=2, progress=progress)
        sink.write(1, {"train/loss": 1.0})
        sink.close()
        seen = capsys.readouterr()
        assert seen.out == "Step 1 | Loss: 1.00\n"
        assert ("1/2 [" in seen.err) == bool(progress)


CONSOLE = """
import logging, os, sys
from forge.observe import ConsoleSink
logging.basicConfig(format="%(message)s")
sink = ConsoleSink(log_interval=1)
for step in range(3):
    sink.write(step, {"train/loss": 1.0})
sink.close()
print("the summary")
sys.exit(7)
"""


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_run_does_not_end_because_its_output_is_not_read(is_closed: bool) -> None:
    """Neither with `>&-` nor with `| head`."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [sys.executable, "-c", CONSOLE]
        if is_closed:
            command = ["bash", "-c", 'exec "$@" >&-', "bash", *command]
        ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    finally:
        os.close(writing)
    warning = "metrics are no longer printed: standard output: Broken pipe; the run continues\n"
    assert (ended.returncode, ended.stderr) == (7, "" if is_closed else warning)
