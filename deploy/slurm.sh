#!/bin/bash
# A Leeway run on the nodes of a Slurm job. Not run yet: see docs/cluster.md.
#
#   sbatch --nodes=4 --gpus-per-node=8 deploy/slurm.sh async_rl --config my.yaml
#
# The driver and the trainer are on the first node. output_dir must be on a disk that all nodes share if the trainer's
# ranks are on more than one.
#SBATCH --job-name=leeway
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --signal=B:TERM@600

set -euo pipefail

port=6379
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
head=${nodes[0]}
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}')

# One token for this job alone. Exported, it reaches every step of the job; it is never on a command line.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN

srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
  ray start --head --block --node-ip-address="$address" --port=$port --include-dashboard=false &

until timeout 5 bash -c "echo > /dev/tcp/$address/$port" 2> /dev/null; do sleep 1; done

if ((${#nodes[@]} > 1)); then
  others=$(IFS=,; echo "${nodes[*]:1}")
  srun --overlap --nodes=$((${#nodes[@]} - 1)) --ntasks-per-node=1 --nodelist="$others" \
    bash -c "while true; do ray start --block --address=$address:$port; sleep 1; done" &
fi

# All nodes have to be there before the run counts them.
srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" python - "$address:$port" "${#nodes[@]}" << 'PYTHON'
import sys, time
import ray

address, wanted = sys.argv[1], int(sys.argv[2])
ray.init(address=address, logging_level="ERROR")
deadline = time.monotonic() + 600
while sum(node["Alive"] for node in ray.nodes()) < wanted:
    if time.monotonic() > deadline:
        sys.exit(f"not all {wanted} nodes have joined within 10 minutes")
    time.sleep(2)
PYTHON

# Slurm's SIGTERM, ten minutes before the end of the job, is for this script: the run saves a checkpoint and ends.
srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" leeway run "$@" cluster.address="$address:$port" &
run=$!
trap 'kill -TERM $run' TERM
code=0
wait $run || code=$?
if kill -0 $run 2> /dev/null; then # the signal ended the first wait
  code=0
  wait $run || code=$?
fi
exit $code
