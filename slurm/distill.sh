#!/usr/bin/env bash
# Distil on any number of nodes and GPUs; arguments are those of `distill.py fit`:
#   sbatch --nodes 2 --ntasks-per-node 8 --gpus-per-node 8 slurm/distill.sh \
#     --config configs/distill/llama3.1-8b.yaml --data.train sharegpt.jsonl --data.batch_size 1 \
#     --run_dir runs/8b
#SBATCH --job-name=distill
#SBATCH --output=slurm-%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --time=24:00:00
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
# To the Python processes (not to this shell), five minutes before the time is up.
#SBATCH --signal=USR1@300
source slurm/_env.sh
trap : USR1  # `scancel --full` sends it to this shell, too, which has to requeue below

srun --kill-on-bad-exit=1 python pipelines/distill.py fit "$@" \
    --trainer.num_nodes "$SLURM_NNODES" --trainer.devices "$SLURM_NTASKS_PER_NODE"
code=$?
# 75: stopped from outside with everything saved; 137: a process was killed (the host's memory, say).
# Every other code ends the chain, and so do three restarts that save no step.
[[ "$code" =~ ^(75|137)$ ]] && scontrol requeue "$SLURM_JOB_ID"
exit "$code"
