"""Distillation from stored logprobs of a teacher; `forge distill` stores them.

forge distill apps/distill/tiny_offline.yaml
python apps/distill/main.py --config apps/distill/tiny_offline.yaml
forge run --nproc_per_node 2 apps/distill/main.py --config apps/distill/qwen3_offline.yaml

On-policy distillation is a run of reinforcement learning, with another program:

python apps/grpo/main.py --config apps/distill/tiny_onpolicy.yaml
"""

from __future__ import annotations

from forge.config import DistillConfig, from_command_line
from forge.loops.programs import run_program
from forge.loops.supervised import run_supervised

if __name__ == "__main__":
    run_program(run_supervised(from_command_line(DistillConfig)))
