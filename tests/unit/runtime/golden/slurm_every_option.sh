#!/bin/bash
#SBATCH --job-name=qwen3-grpo
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=1-12:00:00
#SBATCH --partition=gpu
#SBATCH --account='rl team'
#SBATCH --qos=high
#SBATCH --no-requeue
#SBATCH --no-kill
#SBATCH --output='/shared/100%% logs/%x-%j.log'
#SBATCH --constraint=h200
#SBATCH --cpus-per-task=96

exec srun --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 --cpu-bind=none --label bash -c 'exec '"'"'/opt/my env/bin/python'"'"' -m forge.cli worker --once --address "tls://${SLURMD_NODENAME:-$(hostname)}:23456"'
