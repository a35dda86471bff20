#!/usr/bin/env bash
# Training on machines that Slurm gives: Ray on all of them, the run on the first. From the project's folder:
#     sbatch --nodes=1 examples/clusters/slurm.sh examples/qwen7b_8_h100.toml /shared/runs/mine
#     sbatch --nodes=16 examples/clusters/slurm.sh examples/qwen7b_128_h100.toml /shared/runs/mine
# Project, model and output must be on a file system that all machines share. Before its time is over, or after a
# machine is lost, the job is queued again and goes on from its last checkpoint.
#SBATCH --job-name=pipelinerl
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
run_file=${1:?"usage: sbatch slurm.sh RUN.toml OUT"}
out=${2:?"usage: sbatch slurm.sh RUN.toml OUT"}
source .venv/bin/activate
export RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper=true # vLLM's processes end with their actor
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN                                # nobody else runs code on this cluster
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')

export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # srun does not take it from sbatch

mapfile -t machines < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${machines[0]}
port=6379

# --block keeps Ray, and with it the step, alive until the job ends. Ray finds its address itself: a machine may know its
# own name as that of its loopback.
srun --nodes=1 --ntasks=1 --nodelist="$head" ray start --head --port="$port" --block &
sleep 20
for machine in "${machines[@]:1}"; do
  srun --nodes=1 --ntasks=1 --nodelist="$machine" ray start --address="$head:$port" --block &
done
count='import ray; ray.init(address="auto", log_to_driver=False); print(len(ray.nodes()))'
until [ "$(python -c "$count")" = "${#machines[@]}" ]; do
  ((SECONDS < 900)) || { echo "not all of ${#machines[@]} machines have joined Ray" >&2; exit 1; }
  sleep 5
done

resume=()
if compgen -G "$out/checkpoints/*/manifest.json" >/dev/null; then
  resume=(--resume)
elif [ -e "$out" ] && [ -n "${SLURM_RESTART_COUNT:-}" ]; then
  mv "$out" "$out.$SLURM_RESTART_COUNT" # it had no checkpoint yet
fi
# Not by srun, which kills its step on SIGTERM: this script runs on the first machine.
pipelinerl train "$run_file" --set train.ray_address=auto --out "$out" "${resume[@]}" &
run=$!
again=no status=0
trap 'kill -TERM "$run"' TERM
trap 'again=yes; kill -TERM "$run"' USR1
wait "$run" || status=$?
while kill -0 "$run" 2>/dev/null; do # a signal ends the waiting, not the run, which writes a checkpoint
  status=0
  wait "$run" || status=$?
done
if [ "$again" = yes ] && [ "$status" != 0 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
