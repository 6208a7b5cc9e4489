#!/bin/bash
#SBATCH --job-name=forge
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --no-requeue
#SBATCH --no-kill
#SBATCH --output=/shared/logs/%x-%j.log

exec srun --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 --cpu-bind=none --label bash -c 'exec /opt/env/bin/python -m forge.cli worker --once --address "tcp://${SLURMD_NODENAME:-$(hostname)}:22222"'
