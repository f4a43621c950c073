#!/usr/bin/env bash
# Sets up what is missing, then measures how good the adaptive schedules are, and writes docs/benchmarks-planning.md.
# A run that was cut short goes on where it stopped.
#
#     bash scripts/benchmark_planning.sh             everything
#     bash scripts/benchmark_planning.sh --quick     a sample, in minutes, to .benchmark/planning-quick.md
#
# After scripts/setup.sh, .venv/bin/python -m tools.benchmarks.planning --help lists the other flags.
set -euo pipefail

# shellcheck source=scripts/_start.sh
source "$(dirname "${BASH_SOURCE[0]}")/_start.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
# One thread a process: the benchmark starts as many processes as it is told to.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} NUMBA_NUM_THREADS=${NUMBA_NUM_THREADS:-1}
exec .venv/bin/python -m tools.benchmarks.planning "$@"
