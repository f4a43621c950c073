#!/usr/bin/env bash
# srun starts this once on each node: torchrun, with a rank for each GPU. The arguments are those of pretrain_gpt.py.
set -euo pipefail

# shellcheck source=scripts/_start.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/_start.sh"
program=train.sh
# shellcheck source=examples/slurm/checks.sh
source "$(dirname "${BASH_SOURCE[0]}")/checks.sh"
whole_number SLURM_NNODES 1
whole_number SLURM_NODEID 0
whole_number GPUS_PER_NODE 1

# Each rank writes to its own file. The job's output shows that of the last rank, which prints the iterations, and the
# errors of the first rank.
tee=()
((SLURM_NODEID == 0)) && tee=(0:2)
((SLURM_NODEID == SLURM_NNODES - 1)) && tee+=("$((GPUS_PER_NODE - 1)):3")
folder=$LOGS/node-$SLURM_NODEID
mkdir -p "$folder"

# Nodes have SLURM's numbers, which follow the network, so neighbours in the pipeline are neighbours in the network.
# torchrun's elastic rendezvous (c10d) would sort them by name, so the static one is used.
torchrun=(
  "$PYTHON" -m torch.distributed.run
  --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --nproc-per-node "$GPUS_PER_NODE"
  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --rdzv-id "$SLURM_JOB_ID" --max-restarts 0
  --log-dir "$folder" --redirects 3 ${tee[0]:+--tee "$(IFS=,; echo "${tee[*]}")"}
)

# SLURM sends a signal to each process of a step. Only this script handles USR1. It sends SIGTERM, for which ranks have
# --exit-signal-handler, to the ranks alone: torchrun would kill its ranks after a while, and helper processes of a rank
# that is saving must stay alive.
(
  trap '' USR1
  exec "${torchrun[@]}" pretrain_gpt.py "$@"
) &
job=$!
trap 'pkill -TERM -P "$job" || true' USR1
trap : TERM # torchrun has it too; this script stays until torchrun is gone

while kill -0 "$job" 2>/dev/null; do wait "$job" || true; done
wait "$job"
