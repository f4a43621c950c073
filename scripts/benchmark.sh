#!/usr/bin/env bash
# Sets up what is missing, then measures against stock Megatron and torch, and writes docs/benchmarks.md.
#
#     bash scripts/benchmark.sh                      everything, in under two hours on 2 cores
#     bash scripts/benchmark.sh --quick              a sample of every part, to .benchmark/quick
#     bash scripts/benchmark.sh emulated --json      one part, a JSON object a row
#     bash scripts/benchmark.sh page                 only writes the page again, from docs/benchmarks.json
#
# After scripts/setup.sh, .venv/bin/python -m benchmarks --help lists the parts, and with a part, its flags.
set -euo pipefail

# shellcheck source=scripts/_start.sh
source "$(dirname "${BASH_SOURCE[0]}")/_start.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh >&2
# One thread per process, because ranks are processes, many of them on few cores.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
exec .venv/bin/python -W ignore -m benchmarks "$@"
