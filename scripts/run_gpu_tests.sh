#!/usr/bin/env bash
# Tests on the GPUs of this machine what the other tests can only model, with the Python that is here: it sets nothing
# up and needs no network. Writes a report to data/<the GPU's name>/gpu-tests.md.
#
#     bash scripts/run_gpu_tests.sh                     every piece, each under ten minutes, one after another
#     bash scripts/run_gpu_tests.sh te-split ranges     these pieces; the report keeps what it says of others
#     bash scripts/run_gpu_tests.sh --list              the pieces: what they promise, and how many GPUs they take
#     bash scripts/run_gpu_tests.sh --try-on-cpu        the same steps with tiny models, to see that they work
#     bash scripts/run_gpu_tests.sh --output FILE.md    another report; the results as JSON and the logs go beside it
#
# PYTHON=/path/to/python chooses another Python than .venv's. It must have torch, and megatron-core 0.19 installed or
# unpacked in a folder on PYTHONPATH. Exits with 0 where nothing failed, 1 where a piece did, 2 where a need is missing.
set -euo pipefail

# shellcheck source=scripts/_start.sh
source "$(dirname "${BASH_SOURCE[0]}")/_start.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
if ! type -P "$python" >/dev/null; then
  echo "run_gpu_tests.sh: error: there is no Python $python; set PYTHON to one that has torch and megatron-core" >&2
  exit 2
fi
# One thread per process, because ranks are processes. The NVML check starts no CUDA driver, so that processes can fork.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTORCH_NVML_BASED_CUDA_CHECK=1 TOKENIZERS_PARALLELISM=false
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
# Megatron's fused kernels are compiled only by the piece that tests it: that needs a C compiler, and time on every
# rank.
export TORCHDYNAMO_DISABLE=1
exec "$python" -W ignore -m tools.gpu_tests "$@"
