"""Supervised fine-tuning of a Hugging Face model.

python apps/sft/main.py --config apps/sft/tiny.yaml
forge run apps/sft/main.py --config apps/sft/tiny.yaml training.learning_rate=3e-4
forge run --nproc_per_node 2 apps/sft/main.py --config apps/sft/tiny.yaml
forge run apps/sft/main.py --config apps/sft/tiny.yaml --resume
"""

from __future__ import annotations

from forge.config import SFTConfig, from_command_line
from forge.loops.programs import run_program
from forge.loops.sft import run_sft

if __name__ == "__main__":
    run_program(run_sft(from_command_line(SFTConfig)))
