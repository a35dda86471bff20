#!/usr/bin/env bash
# Training on machines that Slurm gives: Ray on all of them, the run on the first. From the project's folder:
#     sbatch examples/clusters/slurm.sh RUN.toml /shared/runs/mine
# RUN.toml, the model and the output must be on a file system that all machines share.
#SBATCH --job-name=pipelinerl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
set -euo pipefail
run_file=${1:?"usage: sbatch slurm.sh RUN.toml OUT"}
out=${2:?"usage: sbatch slurm.sh RUN.toml OUT"}
source .venv/bin/activate
export RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper=true # vLLM's processes end with their actor
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN                                # nobody else runs code on this cluster
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')

mapfile -t machines < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${machines[0]}
port=6379

# --block keeps Ray, and with it the step, alive until the job ends.
srun --nodes=1 --ntasks=1 --nodelist="$head" ray start --head --node-ip-address="$head" --port="$port" --block &
sleep 20
for machine in "${machines[@]:1}"; do
  srun --nodes=1 --ntasks=1 --nodelist="$machine" ray start --address="$head:$port" --block &
done
sleep 20

srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
  pipelinerl train "$run_file" --set "train.ray_address=$head:$port" --out "$out"
