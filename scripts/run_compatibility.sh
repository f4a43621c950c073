#!/usr/bin/env bash
# Trains each feature of Megatron under each schedule and under stock's own 1F1B, and writes docs/compatibility.md.
# Then tests examples/slurm, under a real SLURM if it is installed (apt-get install slurm-wlm munge).
# On 2 cores without a GPU it takes about an hour. Arguments go to pytest:
#
#     bash scripts/run_compatibility.sh
#     bash scripts/run_compatibility.sh -k recompute
set -uo pipefail

# shellcheck source=scripts/_start.sh
source "$(dirname "${BASH_SOURCE[0]}")/_start.sh"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root" || exit 1
bash scripts/setup.sh || exit 1
export PATH=$root/.venv/bin:$PATH
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 TOKENIZERS_PARALLELISM=false
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}

python -m pytest tests/integration --nightly -m feature --features-to docs/compatibility.json "$@"
status=$?
python -m pytest tests/examples/test_real_slurm.py --nightly || status=$?
python -m benchmarks.compatibility_table || exit 1
exit "$status"
