#!/usr/bin/env bash
# Measures on the GPU of this machine, and writes the figures to data/<its name>:
#
#   profile-<model>.json   times and memory of the passes of one chunk of each model: tools/profile_passes.py, bf16
#   split.jsonl            cost of the split backward, and the engine's time per pass
#   memory.jsonl           memory of 4 and 8 pipeline ranks that share the GPU, with messages through the host
#
#     bash scripts/measure_on_gpu.sh              everything, in half an hour
#     bash scripts/measure_on_gpu.sh --try-on-cpu   the same steps with tiny models, to see that they work
#
# An existing profile is kept; remove it to measure again. Sets up .venv if it is missing.
set -euo pipefail

# shellcheck source=scripts/_start.sh
source "$(dirname "${BASH_SOURCE[0]}")/_start.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case "${1-}" in
"") sample=() ;;
--try-on-cpu) sample=(--quick) ;;
*) echo "measure_on_gpu.sh: error: unknown flag $1; see --help" >&2 && exit 2 ;;
esac
bash scripts/setup.sh >&2

# One thread per process, because ranks are processes. The NVML check starts no CUDA driver, so that processes can fork.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTORCH_NVML_BASED_CUDA_CHECK=1 GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
export CUDA_DEVICE_MAX_CONNECTIONS=1
python=.venv/bin/python

name=$("$python" -c 'import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "")' 2>/dev/null)
if ((${#sample[@]})); then
  [[ -z $name ]] || { echo "measure_on_gpu.sh: error: --try-on-cpu is for machines without a GPU" >&2 && exit 2; }
  name=.benchmark/gpu-steps
  # Name, layers, heads, hidden size. Two layers are profiled, so only their shape matters.
  models=("tiny 8 4 64")
  common=(--seq-length 32 --micro-batch-size 1 --vocab-size 256 --profile-repetitions 3)
  export TORCHDYNAMO_DISABLE=1
else
  [[ -n $name ]] || { echo "measure_on_gpu.sh: error: there is no GPU here; --try-on-cpu tries the steps" >&2 && exit 2; }
  name=data/$(tr -cs '[:alnum:]\n' - <<<"${name,,}")
  models=("9.6b 30 40 5120" "21b 46 48 6144" "38.5b 62 56 7168" "98.5b 78 80 10240")
  common=(--seq-length 1024 --micro-batch-size 1 --bf16 --vocab-size 50257)
fi
mkdir -p "$name"

for model in "${models[@]}"; do
  read -r title layers heads hidden <<<"$model"
  [[ ! -e $name/profile-$title.json ]] || continue
  # Two layers instead of a whole chunk: the profile has as many as the model, each as long as these.
  "$python" tools/profile_passes.py --output "$name/profile-$title.json" --profile-layers 2 \
    --num-layers "$layers" --num-attention-heads "$heads" --hidden-size "$hidden" "${common[@]}"
done

for part in split memory; do
  "$python" -W ignore -m benchmarks "$part" "${sample[@]}" --json >"$name/$part.jsonl.new"
  mv "$name/$part.jsonl.new" "$name/$part.jsonl"
done
echo "everything measured is in $name"
