"""Reinforcement learning of a policy with GRPO and its family.

python apps/grpo/main.py --config apps/grpo/tiny.yaml
forge run apps/grpo/main.py --config apps/grpo/tiny.yaml rollout.staleness=1
forge run apps/grpo/main.py --config apps/grpo/tiny.yaml --resume
"""

from __future__ import annotations

import asyncio
import logging
import math
import shlex
import sys

from forge.config import GRPOConfig, from_command_line
from forge.errors import INPUT_ERRORS, ForgeError
from forge.loops.grpo import GRPOResult, run_grpo
from forge.observe import start_logging


def main() -> None:
    config = from_command_line(GRPOConfig)
    start_logging("info")
    try:
        result = asyncio.run(run_grpo(config))
    except INPUT_ERRORS as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except ForgeError as error:
        logging.getLogger("forge.grpo").debug("the run ended with", exc_info=error)
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)  # the loop has logged where it stopped
    print(summary(result))
    if result.is_stopped:
        sys.exit(result.exit_code)


def summary(result: GRPOResult) -> str:
    """How the run ended, in a few lines."""
    how, nothing = ("Stopped", "no step was taken") if result.is_stopped else ("Done", "nothing was left to do")
    reward = nothing if math.isnan(result.reward) else f"mean reward {result.reward:.3f}"
    lines = [f"{how} after {result.step} steps: {reward}"]
    first, last = result.first_evaluation, result.evaluation
    if first is not None and last is not None:
        lines.append(f"held-out: {first.solved:.1%} -> {last.solved:.1%} of {last.num_prompts} prompts solved")
    if result.report is not None:
        lines.append(f"report: {result.report}")
    if result.export is not None:
        lines.append(f"model: {result.export} (try: forge chat {shlex.quote(str(result.export))})")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
