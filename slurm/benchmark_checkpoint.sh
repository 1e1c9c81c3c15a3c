#!/usr/bin/env bash
# Judge a checkpoint against its baseline, prompts shared by the job's processes; arguments are those
# of benchmark_checkpoint.py, and on a regression the job fails with code 70:
#   sbatch slurm/benchmark_checkpoint.sh runs/new/drafter/latest --baseline baselines/main \
#     --target T --fail_below acceptance_length=-3% --out gate
#SBATCH --job-name=benchmark_checkpoint
#SBATCH --output=slurm-%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --time=04:00:00
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
source slurm/_env.sh

# When a process has ended, the others have a minute to end by themselves.
srun --wait=60 bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS \
    exec python pipelines/benchmark_checkpoint.py "$@"' benchmark_checkpoint "$@"
