"""Where what is printed goes, and what becomes of a stream that is closed."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest

from forge.observe import ConsoleSink
from forge.observe.lines import bar_text, format_loss, format_norm, format_rate, format_tokens_per_s


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


def test_a_pipe_gets_no_bar_unless_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for progress in (None, True):
        sink = ConsoleSink(log_interval=1, total_steps=2, progress=progress)
        sink.write(1, {"train/loss": 1.0})
        sink.close()
        seen = capsys.readouterr()
        assert seen.out == "Step 1/2 | loss 1.00\n"
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
