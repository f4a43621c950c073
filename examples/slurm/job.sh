# shellcheck shell=bash
# Functions that the sbatch scripts share; sourced in the root of the repository. README.md lists the environment
# variables that set them.

program=${SLURM_JOB_NAME:-job}
# shellcheck source=examples/slurm/checks.sh
source examples/slurm/checks.sh

say() { echo "$(date '+%F %T') $program: $*"; }

# read_job: reads the numbers of the job from SLURM's variables.
read_job() {
  whole_number SLURM_NNODES 1
  whole_number SLURM_JOB_ID 1 4294967295
  SLURM_RESTART_COUNT=${SLURM_RESTART_COUNT:-0}
  whole_number SLURM_RESTART_COUNT 0
  export MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
  whole_number MASTER_PORT 1 65535
}

# read_settings <model file>: makes arrays of flags for pretrain_gpt.py.
read_settings() {
  local model=$1 extra data tokenizer
  [[ -f $model ]] || model=examples/slurm/$1
  [[ -f $model ]] || fail "no model file $1; there are $(cd examples/slurm && echo models/*.sh)"
  source_model "$model"

  export PYTHON=${PYTHON:-$PWD/.venv/bin/python}
  [[ -n ${SRUN_FLAGS:-} ]] || type -P "$PYTHON" >/dev/null ||
    fail "no Python at $PYTHON: set PYTHON, or run scripts/setup.sh"
  export GPUS_PER_NODE=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}
  whole_number GPUS_PER_NODE 1 # SLURM's value too, if it is not set
  TRAIN_ITERS=${TRAIN_ITERS:-10000}
  whole_number TRAIN_ITERS 1
  local sequence=${SEQ_LENGTH:-2048}

  SCHEDULE_FLAGS=()
  if [[ -n ${SCHEDULE=v-half} ]]; then # set and empty: Megatron's own 1F1B
    SCHEDULE_FLAGS+=(--pipeline-schedule "$SCHEDULE")
    [[ -z ${MEMORY_LIMIT:-} ]] || SCHEDULE_FLAGS+=(--pipeline-memory-limit "$MEMORY_LIMIT")
    [[ -z ${SCHEDULE_COSTS:-} ]] || SCHEDULE_FLAGS+=(--pipeline-costs "$SCHEDULE_COSTS")
  fi
  BATCH_FLAGS=(--micro-batch-size "${MICRO_BATCH_SIZE:-1}" --global-batch-size "$GLOBAL_BATCH_SIZE")

  case ${RECOMPUTE:-selective} in
    none) RECOMPUTE_FLAGS=() ;;
    # Local layers save the scores of each head, sequence x sequence: these are worth recomputing.
    selective) RECOMPUTE_FLAGS=(--recompute-granularity selective) ;;
    full) RECOMPUTE_FLAGS=(--recompute-granularity full --recompute-method uniform --recompute-num-layers 1) ;;
    *) fail "RECOMPUTE=$RECOMPUTE is none of none, selective and full" ;;
  esac

  TRAIN_FLAGS=(
    --seq-length "$sequence" --max-position-embeddings "$sequence"
    --untie-embeddings-and-output-weights --no-create-attention-mask-in-dataloader
    --bf16 --attention-dropout 0 --hidden-dropout 0 --clip-grad 1.0 --weight-decay 0.1 --adam-beta2 0.95
    --use-distributed-optimizer # costs nothing, and with several replicas each stores a part of its state
    --lr "${LR:-1.5e-4}" --min-lr "${MIN_LR:-1.5e-5}" --lr-decay-style cosine --lr-warmup-fraction 0.01
    --train-iters "$TRAIN_ITERS" --eval-interval 1000 --eval-iters "${EVAL_ITERS:-10}" --log-interval 1 --log-throughput
    --transformer-impl "${TRANSFORMER_IMPL:-local}"
  )
  # Without the kernels of Apex, which are rarely installed.
  TRAIN_FLAGS+=(--no-gradient-accumulation-fusion)
  [[ ${TRANSFORMER_IMPL:-local} != local ]] || TRAIN_FLAGS+=(--no-masked-softmax-fusion --no-persist-layer-norm)

  if [[ -n ${DATA_PATH:-} ]]; then
    read -ra data <<<"$DATA_PATH"
    TRAIN_FLAGS+=(--data-path "${data[@]}" --split "${SPLIT:-98,1,1}")
  else
    TRAIN_FLAGS+=(--mock-data)
  fi
  read -ra tokenizer <<<"${TOKENIZER_FLAGS:---tokenizer-type NullTokenizer --vocab-size 50304}"
  read -ra extra <<<"${EXTRA_FLAGS:-}"
  TRAIN_FLAGS+=("${tokenizer[@]}" "${extra[@]}") # the last of two equal flags wins

  # One folder of plans, so that later jobs read what an earlier one found.
  export MEGATRON_SCHEDULES_CACHE=${MEGATRON_SCHEDULES_CACHE:-$PWD/runs/plans}
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8} NCCL_DEBUG=${NCCL_DEBUG:-WARN} PYTHONUNBUFFERED=1
}

# start <folder for logs> <flags of pretrain_gpt.py...>: starts the ranks on all nodes; $step is the process of srun.
# Call read_job and read_settings first.
start() {
  local more
  export LOGS=$1 MASTER_ADDR
  shift
  read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  read -ra more <<<"${SRUN_FLAGS:-}"
  # One hardware queue per GPU, which Megatron requires under tensor and context parallelism up to Hopper. Otherwise
  # more queues let messages overtake matrix products.
  [[ ! " $* " =~ --(tensor-model|context)-parallel-size[\ =]([2-9]|1[0-9]) ]] ||
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
  say "$SLURM_NNODES nodes x $GPUS_PER_NODE ranks; a log for each in $LOGS"
  srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 \
    --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=1 "${more[@]}" bash examples/slurm/train.sh "$@" &
  step=$!
}

# finish: waits for the ranks, also across signals, and returns their status.
finish() {
  while kill -0 "$step" 2>/dev/null; do wait "$step" || true; done
  wait "$step"
}

# saved: prints the iteration of the last complete checkpoint, 0 without one. Weights without an iteration ("release")
# are a checkpoint too, from which Megatron starts at 0.
saved() {
  number_in "$RUN/checkpoints/latest_checkpointed_iteration.txt" \
    "write the iteration of the last whole checkpoint there, or remove it to begin anew" release
}

# train_until_done <model file>: trains from the last checkpoint on. If the job ends early after progress or a warning,
# it is requeued. A job without progress fails.
train_until_done() {
  local ranks before after fruitless status=0 warned='' cancelled='' step=''
  read_job
  read_settings "$1"
  ranks=$((SLURM_NNODES * GPUS_PER_NODE))
  ((ranks % GPUS == 0)) ||
    fail "$1 needs a multiple of $GPUS GPUs; $SLURM_NNODES nodes with $GPUS_PER_NODE each have $ranks"
  RUN=${RUN:-$PWD/runs/$SLURM_JOB_NAME-$SLURM_JOB_ID} # the same after a requeue
  mkdir -p "$RUN"
  ((SLURM_RESTART_COUNT)) || rm -f "$RUN/fruitless"
  fruitless=$(number_in "$RUN/fruitless" "remove it") || exit
  before=$(saved) || exit
  ((before < TRAIN_ITERS)) || {
    say "nothing to do: $RUN is at iteration $before of $TRAIN_ITERS"
    return
  }
  say "from iteration $before of $TRAIN_ITERS in $RUN"

  trap 'warned=1; say "told to end: saving"; [[ -z $step ]] || kill -USR1 "$step"' USR1
  trap 'cancelled=1' TERM
  start "$RUN/logs/$SLURM_JOB_ID-$SLURM_RESTART_COUNT" \
    "${MODEL_FLAGS[@]}" "${PARALLEL_FLAGS[@]}" "${SCHEDULE_FLAGS[@]}" "${BATCH_FLAGS[@]}" "${RECOMPUTE_FLAGS[@]}" \
    --save "$RUN/checkpoints" --load "$RUN/checkpoints" --save-interval "${SAVE_INTERVAL:-500}" --exit-signal-handler \
    "${TRAIN_FLAGS[@]}"
  finish || status=$?
  after=$(saved) || exit # not requeued: the next start would find the same

  if ((after >= TRAIN_ITERS)); then
    say "done: $after iterations"
    return "$status"
  fi
  [[ -z $cancelled ]] || {
    say "ended by SLURM at iteration $after; if it was preempted, SLURM queues it again"
    return 1
  }
  if ((after > before)); then
    fruitless=0
  else
    # A job that is preempted before its first checkpoint may try again, but not for ever.
    fruitless=$((fruitless + 1))
    if [[ -z $warned ]] || ((fruitless >= 3)); then
      say "failed with status $status and nothing saved since iteration $before: not queued again"
      return $((status ? status : 1))
    fi
  fi
  echo "$fruitless" >"$RUN/fruitless"
  say "ended with status $status at iteration $after of $TRAIN_ITERS: queued again"
  scontrol requeue "$SLURM_JOB_ID"
}
