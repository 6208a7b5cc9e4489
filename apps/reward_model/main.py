"""Training of a reward model on preference pairs.

python apps/reward_model/main.py --config apps/reward_model/tiny.yaml
forge run apps/reward_model/main.py --config apps/reward_model/tiny.yaml reward_model.centering_coefficient=0
forge run --nproc_per_node 2 apps/reward_model/main.py --config apps/reward_model/tiny.yaml
forge run apps/reward_model/main.py --config apps/reward_model/tiny.yaml --resume
"""

from __future__ import annotations

from forge.config import RewardTrainingConfig, from_command_line
from forge.loops.programs import run_program
from forge.loops.reward_model import run_reward_model

if __name__ == "__main__":
    run_program(run_reward_model(from_command_line(RewardTrainingConfig)))
