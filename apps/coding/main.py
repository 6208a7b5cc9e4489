"""A tiny model learns to write a function and to repair it: python apps/coding/main.py [--seed N] [key=value …]."""

from __future__ import annotations

import sys
from pathlib import Path

from functions import write_files

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from warm_start import main  # noqa: E402

if __name__ == "__main__":
    main(HERE, write_files)
