"""A solver and a critic learn together: python apps/critic/main.py [--seed N] [key=value …]."""

from __future__ import annotations

import sys
from pathlib import Path

from offers import write_files

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from warm_start import main  # noqa: E402

if __name__ == "__main__":
    main(HERE, write_files)
