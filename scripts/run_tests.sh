#!/usr/bin/env bash
# Sets up what is missing, then checks the code and runs the tests of the day: pure ones and jobs of several ranks.
# "pure" leaves out the jobs, "night" adds what takes hours. Other arguments go to pytest:
#
#     bash scripts/run_tests.sh
#     bash scripts/run_tests.sh pure
#     bash scripts/run_tests.sh night
#     bash scripts/run_tests.sh tests/planner -k adaptive
set -uo pipefail

# shellcheck source=scripts/_start.sh
source "$(dirname "${BASH_SOURCE[0]}")/_start.sh"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root" || exit 1
bash scripts/setup.sh || exit 1
export PATH=$root/.venv/bin:$PATH

# Many small processes on few cores: one thread each, no compiler, and only the loopback interface.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} MKL_NUM_THREADS=${MKL_NUM_THREADS:-1}
export TORCHDYNAMO_DISABLE=${TORCHDYNAMO_DISABLE:-1} TOKENIZERS_PARALLELISM=false
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}

failed=()

# step <name> <command...>: runs the command, quietly unless it fails, and reports the result in one line.
step() {
  local name=$1 begun=$SECONDS output
  shift
  if output=$("$@" 2>&1); then
    echo "== $name: passed ($((SECONDS - begun)) s)"
  else
    printf '%s\n' "$output"
    echo "== $name: FAILED ($((SECONDS - begun)) s): $*"
    failed+=("$name")
  fi
}

step "ruff check" ruff check .
step "ruff format" ruff format --check .
step "mypy" mypy
step "import-linter" lint-imports

# report <name> <begun> <status>: reports the result in one line.
report() {
  if (($3 == 0)); then
    echo "== $1: passed ($((SECONDS - $2)) s)"
  else
    echo "== $1: FAILED ($((SECONDS - $2)) s)"
    failed+=("$1")
  fi
}

tests() { python -m pytest tests -p no:cacheprovider --durations=10 --durations-min=1 "$@"; }

# in_two <marks> <option>: Jobs of several ranks mostly wait for one another. Pure tests run at the same time, and are
# shown afterwards.
in_two() {
  local pure status
  pure=$(mktemp)
  trap 'rm -f "$pure"' EXIT
  trap 'kill 0' INT TERM
  tests -m pure >"$pure" 2>&1 &
  echo "== pytest -m \"$1\", at the same time as -m pure"
  tests -m "$@"
  report "pytest -m \"$1\"" "$begun" $?
  wait $!
  status=$?
  echo "== pytest -m pure"
  cat "$pure"
  report "pytest -m pure" "$begun" "$status"
}

begun=$SECONDS
case ${1-} in
"") in_two job ;;
night) in_two "job or nightly" --nightly ;;
pure)
  tests -m pure
  report "pytest -m pure" "$begun" $?
  ;;
*)
  python -m pytest "$@"
  report pytest "$begun" $?
  ;;
esac

if ((${#failed[@]})); then
  (IFS=,; echo "== failed: ${failed[*]}" | sed 's/,/, /g')
  exit 1
fi
echo "== everything passed ($SECONDS s)"
