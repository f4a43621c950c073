#!/usr/bin/env bash
# Runs the tests with the mark gpu, which show on the GPUs of this machine what the other tests can only model, with the
# Python that is here: it sets nothing up and needs no network. Prints what was measured. Arguments go to pytest:
#
#     bash scripts/run_gpu_tests.sh                            all of them, those for four GPUs too if there are four
#     bash scripts/run_gpu_tests.sh -k "te_linears or ranges"  those with such a name; each takes under ten minutes
#     bash scripts/run_gpu_tests.sh --collect-only -q          their names
#     bash scripts/run_gpu_tests.sh --try-on-cpu               the same steps with tiny models, to see that they work
#     bash scripts/run_gpu_tests.sh --junitxml FILE.xml        also writes results and figures to a file
#
# PYTHON=/path/to/python chooses another Python than .venv's. It must have torch, pytest, and megatron-core 0.19
# installed or unpacked in a folder on PYTHONPATH. Exits with 2 where a need is missing, else as pytest does.
set -euo pipefail

# shellcheck source=scripts/_start.sh
source "$(dirname "${BASH_SOURCE[0]}")/_start.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

refuse() {
  echo "run_gpu_tests.sh: error: $1" >&2
  exit 2
}

python=${PYTHON:-.venv/bin/python} needed="set PYTHON to one that has torch, megatron-core 0.19 and pytest"
type -P "$python" >/dev/null || refuse "there is no Python $python; $needed"
# One thread per process, because ranks are processes. The NVML check starts no CUDA driver, so that processes can fork.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTORCH_NVML_BASED_CUDA_CHECK=1 TOKENIZERS_PARALLELISM=false
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
# Megatron's fused kernels are compiled only by the test that is about it: that needs a C compiler, and time on every
# rank.
export TORCHDYNAMO_DISABLE=1
if ! gpus=$("$python" -W ignore -c '
from importlib.util import find_spec
import pytest, torch
for name in ("megatron.core", "megatron.training"):
    if find_spec(name) is None: raise ModuleNotFoundError(f"there is no {name} here")
print(torch.cuda.device_count() if torch.cuda.is_available() else 0)' 2>&1); then
  refuse "$python lacks something ($(tail -n 1 <<<"$gpus")); $needed"
fi
case " $* " in
*" --try-on-cpu "* | *" --collect-only "*) ;;
*) [[ ${gpus##*$'\n'} != 0 ]] || refuse "there is no GPU here; --try-on-cpu tries the steps" ;;
esac
exec "$python" -W ignore -m pytest -p no:cacheprovider -m gpu -rsP tests/gpu "$@"
