"""A supervised run as a program: what it logs and prints, and what it exits with."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
from collections.abc import Coroutine
from typing import Any

from forge.errors import INPUT_ERRORS, ForgeError
from forge.loops.supervised import SupervisedResult
from forge.observe import start_logging


def run_program(running: Coroutine[Any, Any, SupervisedResult]) -> None:
    """Run `run_sft(config)`, or another supervised run, as the program of this process, and print how it ended.

    In every rank of `forge run --nproc_per_node`, or once. Exits with 2 for bad input, 1 for other errors, and 128 plus
    the number of the signal that stopped it.
    """
    is_first = os.environ.get("RANK", "0") == "0"
    start_logging("info" if is_first else "error")
    try:
        result = asyncio.run(running)
    except INPUT_ERRORS as error:
        if is_first:
            print(error, file=sys.stderr)
        sys.exit(2)
    except ForgeError as error:
        logging.getLogger("forge.loops").debug("the run ended with", exc_info=error)
        if is_first:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)  # the loop has logged where it stopped
    if is_first:
        print(summary(result))
    if result.is_stopped:
        sys.exit(result.exit_code)


def summary(result: SupervisedResult) -> str:
    """Return how a run ended, in one line."""
    loss = "nothing was left to do" if math.isnan(result.loss) else f"loss {result.loss:.4f}"
    found = [loss] if result.validation_loss is None else [loss, f"validation loss {result.validation_loss:.4f}"]
    metrics = result.validation_metrics
    found += [f"accuracy {metrics['accuracy']:.1%}"] if "accuracy" in metrics else []
    found += [f"calibration error {metrics['ece']:.3f}"] if "ece" in metrics else []
    return f"{'Stopped' if result.is_stopped else 'Done'} after {result.step} steps: {', '.join(found)}"
