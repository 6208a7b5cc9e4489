"""Preference optimisation of a Hugging Face model: DPO, IPO, KTO, ORPO or SimPO.

python apps/dpo/main.py --config apps/dpo/tiny.yaml
forge run apps/dpo/main.py --config apps/dpo/tiny.yaml preference.kind=ipo
forge run --nproc_per_node 2 apps/dpo/main.py --config apps/dpo/tiny.yaml
forge run apps/dpo/main.py --config apps/dpo/tiny.yaml --resume
"""

from __future__ import annotations

from forge.config import PreferenceConfig, from_command_line
from forge.loops.preference import run_preference
from forge.loops.programs import run_program

if __name__ == "__main__":
    run_program(run_preference(from_command_line(PreferenceConfig)))
