#!/usr/bin/env bash
# What srun starts once on every node: torchrun, with a rank for every GPU. The arguments are pretrain_gpt.py's.
set -euo pipefail

# shellcheck source=scripts/_start.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/_start.sh"
program=train.sh
# shellcheck source=examples/slurm/checks.sh
source "$(dirname "${BASH_SOURCE[0]}")/checks.sh"
whole_number SLURM_NNODES 1
whole_number SLURM_NODEID 0
whole_number GPUS_PER_NODE 1

# Every rank writes into a file of its own. The job's output shows the last rank's, which prints the iterations, and the
# first rank's errors.
tee=()
((SLURM_NODEID == 0)) && tee=(0:2)
((SLURM_NODEID == SLURM_NNODES - 1)) && tee+=("$((GPUS_PER_NODE - 1)):3")
folder=$LOGS/node-$SLURM_NODEID
mkdir -p "$folder"

# Nodes are numbered as SLURM numbers them, by the network: neighbours in the pipeline are neighbours there. torchrun's
# elastic rendezvous (c10d) would sort them by name; nothing here is elastic, so the static one does.
torchrun=(
  "$PYTHON" -m torch.distributed.run
  --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --nproc-per-node "$GPUS_PER_NODE"
  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --rdzv-id "$SLURM_JOB_ID" --max-restarts 0
  --log-dir "$folder" --redirects 3 ${tee[0]:+--tee "$(IFS=,; echo "${tee[*]}")"}
)

# SLURM sends a signal to every process of a step. Of USR1 only this script takes notice, and hands it on as the SIGTERM
# of --exit-signal-handler to the ranks alone: torchrun would kill its ranks after a while, and the helpers of a rank
# that is saving must live on.
(
  trap '' USR1
  exec "${torchrun[@]}" pretrain_gpt.py "$@"
) &
job=$!
trap 'pkill -TERM -P "$job" || true' USR1
trap : TERM # torchrun has it too; this script stays until torchrun is gone

while kill -0 "$job" 2>/dev/null; do wait "$job" || true; done
wait "$job"
