#!/usr/bin/env bash
# Finds the most promising settings for a model by grid search, and runs each for a few iterations as an array of jobs.
# After the last one, another job writes predicted and measured figures to table.md and table.csv.
#
#     bash examples/slurm/sweep.sh 98.5B
#     GPUS=80 SEQ_LENGTH=8192 TOP=4 bash examples/slurm/sweep.sh 98.5B --partition=big --account=mine
#
# Arguments after the model go to sbatch. README.md has the settings.
set -euo pipefail

# shellcheck source=scripts/_start.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/_start.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
program=sweep.sh
# shellcheck source=examples/slurm/checks.sh
source examples/slurm/checks.sh

(($#)) || fail "give a model, such as 98.5B"
name=$1
shift
wanted=${GPUS:-}
model=${MODEL_FILE:-examples/slurm/models/$name.sh}
[[ -f $model ]] || fail "no model $name; there are $(cd examples/slurm/models && echo *.sh | sed 's/\.sh//g')"
source_model "$model"
GPUS=${wanted:-$GPUS} GPUS_PER_NODE=${GPUS_PER_NODE:-8} python=${PYTHON:-.venv/bin/python}
whole_number GPUS 1
whole_number GPUS_PER_NODE 1
[[ -z ${PARALLEL_JOBS:-} ]] || whole_number PARALLEL_JOBS 1
((GPUS % GPUS_PER_NODE == 0)) ||
  fail "$GPUS GPUs are no whole number of nodes with $GPUS_PER_NODE; set GPUS or GPUS_PER_NODE"
# The estimate assumes fused attention.
export SEQ_LENGTH=${SEQ_LENGTH:-3072} GPUS_PER_NODE TRANSFORMER_IMPL=${TRANSFORMER_IMPL:-transformer_engine}
folder=${SWEEP:-$PWD/runs/sweep-$name-$(date +%Y%m%d-%H%M%S)}
mkdir -p "$folder"

if [[ ! -s $folder/candidates.csv ]]; then
  "$python" "${GRID_SEARCH:-tools/grid_search.py}" --model "$name" --gpus "$GPUS" --sequence-length "$SEQ_LENGTH" \
    --batch-size "$GLOBAL_BATCH_SIZE" --top "${TOP:-2}" --format csv >"$folder/candidates.csv.part"
  mv "$folder/candidates.csv.part" "$folder/candidates.csv"
fi
count=$("$python" -m tools.collect_sweep "$folder" --count)
is_whole_number "$count" 1 999999999 || fail "$python says $(shown "$count") and not how many candidates there are"

array=$(sbatch --parsable --array="0-$((count - 1))${PARALLEL_JOBS:+%$PARALLEL_JOBS}" --nodes="$((GPUS / GPUS_PER_NODE))" \
  --gpus-per-node="$GPUS_PER_NODE" --output="$folder/job-%a.out" "$@" examples/slurm/candidate.sbatch "$model" "$folder")
array=${array%%;*} # a cluster's name may follow
last=$(sbatch --parsable --dependency="afterany:$array" --nodes=1 --output="$folder/collect.out" "$@" \
  examples/slurm/collect.sbatch "$folder")
echo "sweep.sh: $count candidates in job $array; job ${last%%;*} writes $folder/table.md"
