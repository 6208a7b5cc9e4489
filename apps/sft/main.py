"""Supervised fine-tuning of a Hugging Face model.

python apps/sft/main.py --config apps/sft/tiny.yaml
forge run apps/sft/main.py --config apps/sft/tiny.yaml training.learning_rate=3e-4
forge run --nproc_per_node 2 apps/sft/main.py --config apps/sft/tiny.yaml
forge run apps/sft/main.py --config apps/sft/tiny.yaml --resume
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys

from forge.config import SFTConfig, from_command_line
from forge.errors import INPUT_ERRORS, ForgeError
from forge.loops.sft import run_sft


def main() -> None:
    config = from_command_line(SFTConfig)
    is_first = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(level=logging.INFO if is_first else logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
    try:
        result = asyncio.run(run_sft(config))
    except INPUT_ERRORS as error:
        if is_first:
            print(error, file=sys.stderr)
        sys.exit(2)
    except ForgeError as error:
        logging.getLogger("forge.sft").debug("the run ended with", exc_info=error)
        if is_first:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)  # the loop has logged where it stopped
    if is_first:
        validation = "" if result.validation_loss is None else f", validation loss {result.validation_loss:.4f}"
        loss = "nothing was left to do" if math.isnan(result.loss) else f"loss {result.loss:.4f}"
        how = "Stopped" if result.is_stopped else "Done"
        print(f"{how} after {result.step} steps: {loss}{validation}")
    if result.is_stopped:
        sys.exit(result.exit_code)


if __name__ == "__main__":
    main()
