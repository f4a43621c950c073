#!/usr/bin/env bash
# Trains a small GPT on real text with four pipeline ranks, under V-Half and then under 1F1B, and compares losses and
# memory. Then runs both plans with passes that sleep for their planned time, and compares speed. Needs no GPU. The
# first run sets up .venv, which downloads packages (2 to 10 minutes); after that it takes about two minutes.
#
#     bash scripts/train_demo.sh                              V-Half against 1F1B
#     bash scripts/train_demo.sh --pipeline-schedule v-zb     another schedule against 1F1B
#     bash scripts/train_demo.sh --train-iters 100            any flag of pretrain_gpt.py, for both runs
#
# Logs, timelines and data go to .demo.
set -euo pipefail

# shellcheck source=scripts/_start.sh
source "$(dirname "${BASH_SOURCE[0]}")/_start.sh"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"
begun=$SECONDS
bash scripts/setup.sh
demo=$root/.demo
python=$root/.venv/bin/python

schedule=v-half
flags=()
while (($#)); do
  case $1 in
    --pipeline-schedule)
      schedule=${2:?--pipeline-schedule needs a name}
      shift
      ;;
    --pipeline-schedule=*) schedule=${1#*=} ;;
    *) flags+=("$1") ;;
  esac
  shift
done

say() { echo "demo: $*"; }

# fail <log> <what failed> [followed]: ends the demo. Every rank prints a traceback and torchrun a summary after them:
# the first errors tell most. A refusal (error: ...) was shown already where the log was followed.
fail() {
  if [[ ${3-} != followed ]] || ! grep -q '\berror: ' "$1"; then
    { grep -E '(Error|Exception)(: .*)?$|\berror: ' "$1" || tail -n 20 "$1"; } |
      grep -v ChildFailedError | sed -E 's/^\[rank[0-9]+\]: *//' | awk '!seen[$0]++' | head -n 5 >&2
  fi
  echo "demo: error: $2 failed; $1 has all of it" >&2
  exit 1
}

# A misspelt name is refused at once. A file, and the two that search for a plan, are left to the training.
case $schedule in
  auto | adaptive* | *.csv) ;;
  *) "$root/.venv/bin/megatron-schedules" plan --schedule "$schedule" --pipeline-size 4 --microbatches 8 --format csv \
    >/dev/null || exit 2 ;;
esac

# The corpus depends on the Python and on two tools. It is made again when one of them changes.
corpus=$demo/$(cat tools/demo_corpus.py tools/preprocess_data.py .venv/pyvenv.cfg | sha256sum | cut -c1-12)
if [[ ! -f $corpus/python_text_document.idx ]]; then
  say "making the corpus from the source files of the Python installation"
  mkdir -p "$corpus"
  "$python" tools/demo_corpus.py --output "$corpus/python.jsonl" --megabytes 6
  "$python" tools/preprocess_data.py --input "$corpus/python.jsonl" --output-prefix "$corpus/python" \
    --append-eod
fi

ranks=4
model=(
  --num-layers 8 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
  --untie-embeddings-and-output-weights --disable-bias-linear --normalization RMSNorm --no-persist-layer-norm
  --tokenizer-type NullTokenizer --vocab-size 257 --make-vocab-size-divisible-by 1
  --data-path "$corpus/python_text_document" --split "90,5,5"
  --micro-batch-size 2 --global-batch-size 16 --train-iters 50
  --lr 1.5e-3 --min-lr 1.5e-4 --lr-decay-style cosine --lr-warmup-fraction 0.2 --adam-beta2 0.95 --weight-decay 0.1
  # Clipping adds up norms by rank, and ranks have different layers: its rounding would make two runs drift apart.
  --clip-grad 0
  --attention-dropout 0 --hidden-dropout 0 --seed 1234 --num-workers 0
  --eval-iters 2 --eval-interval 1000 --log-interval 1
)
# Megatron's own linear layers, without Apex's kernels. With fewer GPUs than ranks it runs on the CPU over gloo.
model+=(--transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion)
on_cpu=yes
if "$python" -c "import sys, torch; sys.exit(torch.cuda.device_count() < $ranks)" >/dev/null 2>&1; then
  on_cpu=''
  model+=(--bf16)
else
  model+=(--distributed-backend gloo)
  export CUDA_VISIBLE_DEVICES="" TORCHDYNAMO_DISABLE=1 GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} CUDA_DEVICE_MAX_CONNECTIONS=1 PYTHONUNBUFFERED=1

# Initial weights depend on the placement of layers. So that both runs start from the same ones, a job without a
# pipeline draws and saves them (with a learning rate of 0).
weights=$demo/weights-$(echo "${model[@]}" "${flags[@]}" | sha256sum | cut -c1-12)
if [[ ! -f $weights/latest_checkpointed_iteration.txt ]]; then
  say "drawing the weights that both runs start from"
  rm -rf "$weights"
  if ! "$python" -m torch.distributed.run --standalone --nproc-per-node 1 pretrain_gpt.py "${model[@]}" "${flags[@]}" \
    --lr 0 --min-lr 0 --train-iters 1 --lr-warmup-fraction 0 --global-batch-size 2 --eval-iters 0 \
    --save "$weights" --save-interval 1 --no-save-optim >"$demo/weights.log" 2>&1
  then
    rm -rf "$weights"
    fail "$demo/weights.log" "drawing the weights"
  fi
fi
start=(--load "$weights" --finetune --no-load-optim --no-load-rng)

# train <schedule>: shows the lines that matter, and writes all output to the log.
train() {
  local log=$demo/${1##*/}.log
  say "training under $1, $ranks pipeline ranks; everything it prints goes to ${log#"$root"/}"
  if ! "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" pretrain_gpt.py "${model[@]}" \
    --pipeline-model-parallel-size "$ranks" --pipeline-schedule "$1" \
    --pipeline-measure "$demo/${1##*/}-timeline" "${start[@]}" "${flags[@]}" 2>&1 |
    "$python" scripts/compare_logs.py --follow "$log"
  then
    fail "$log" "the training under $1" followed
  fi
}

train "$schedule"
names=("$schedule=$demo/${schedule##*/}.log")
if [[ $schedule != 1f1b ]]; then
  train 1f1b
  names+=("1f1b=$demo/1f1b.log")
fi

# recorded <schedule>: the file in which that training recorded its plan, and nothing where it measured no iteration.
# The log says where: flags of the caller's may have sent it elsewhere.
recorded() {
  sed -n 's/.*pipeline schedule: timeline of iteration .* written to \(.*\): timeline\.html.*/\1\/recorded.json/p' \
    "$demo/${1##*/}.log" | tail -n 1
}
plan=$(recorded "$schedule")

echo
if [[ -n $on_cpu ]]; then
  say "losses and memory below are real. Tokens per second do not compare the schedules:"
  say "$ranks ranks share $(getconf _NPROCESSORS_ONLN) cores here, and a rank that waits leaves its core to another."
fi
"$python" scripts/compare_logs.py "${names[@]}"

if [[ -n $on_cpu && $schedule != 1f1b && -z $plan ]]; then
  say "speed is not compared: no iteration was recorded. It takes --train-iters 5 or more, without --pipeline-measure."
elif [[ -n $on_cpu && $schedule != 1f1b ]]; then
  echo
  say "now the same two plans with passes that sleep for their planned time (about 20 s). Sleeping takes no core, so"
  say "every rank is as fast as with a device of its own. This is an emulation, not a measurement of GPUs."
  "$python" scripts/emulate_plans.py "$schedule=$plan" "1f1b=$(recorded 1f1b)" || true
fi

echo
page=${plan%/*}/timeline.html
[[ -z $plan ]] || say "one iteration beside its plan: open ${page#"$root"/} in a browser"
say "compare schedules for your own pipeline with: .venv/bin/megatron-schedules compare --help"
say "done in $((SECONDS - begun)) s"
