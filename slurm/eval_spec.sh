#!/usr/bin/env bash
# Evaluate a checkpoint or a whole run, prompts shared by the job's processes; arguments are those
# of eval_spec.py, in which %a is the number of the array's task:
#   sbatch --dependency=afterok:JOB slurm/eval_spec.sh --run runs/8b --config configs/eval/mine.yaml
#   sbatch --array=1-4 slurm/eval_spec.sh --run runs/seed-%a
#SBATCH --job-name=eval_spec
#SBATCH --output=slurm-%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --time=04:00:00
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
source slurm/_env.sh

# When a process has ended, the others have a minute to end by themselves.
srun --wait=60 bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS \
    exec python pipelines/eval_spec.py "$@"' eval_spec "${@//%a/${SLURM_ARRAY_TASK_ID:-}}"
