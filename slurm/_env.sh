# The environment of every job here; sourced from the repository's folder. Edit for your cluster.

# module load cuda                     # where torch brings no CUDA of its own
# export NCCL_SOCKET_IFNAME=ib0        # where nodes reach each other over another interface
export STREE_VENV="${STREE_VENV:-$PWD/.venv}"
export PATH="$STREE_VENV/bin:$PATH"
export PYTHONUNBUFFERED=1              # lines in the job's output as they are said

export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"  # srun does not take over sbatch's

# Where the processes of a job meet (not MASTER_ADDR: a job that a job submits inherits that).
export MASTER_ADDR="${STREE_MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}"
export MASTER_PORT="$((15000 + SLURM_JOB_ID % 10000))"
