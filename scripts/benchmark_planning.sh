#!/usr/bin/env bash
# Sets up what is missing, then measures how good the adaptive schedules are, and writes docs/benchmarks-planning.md.
# An interrupted run continues where it stopped.
#
#     bash scripts/benchmark_planning.sh             everything
#     bash scripts/benchmark_planning.sh --quick     a sample, in minutes, to .benchmark/planning-quick.md
#
# After scripts/setup.sh, .venv/bin/python -m benchmarks.planning --help lists the other flags.
set -euo pipefail

# shellcheck source=scripts/_start.sh
source "$(dirname "${BASH_SOURCE[0]}")/_start.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
# One thread per process: --jobs says how many processes to start.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} NUMBA_NUM_THREADS=${NUMBA_NUM_THREADS:-1}
exec .venv/bin/python -m benchmarks.planning "$@"
