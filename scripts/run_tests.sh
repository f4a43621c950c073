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

# The searches' code is compiled for all tests, beside the checks.
python -c "from megatron.schedules.search.compiled import compiled_climb; compiled_climb()" &
compiling=$!

step "ruff check" ruff check .
step "ruff format" ruff format --check .

# report <name> <begun> <status>: reports the result in one line.
report() {
  if (($3 == 0)); then
    echo "== $1: passed ($((SECONDS - $2)) s)"
  else
    echo "== $1: FAILED ($((SECONDS - $2)) s)"
    failed+=("$1")
  fi
}

slow_checks() {
  step "mypy" mypy
  step "import-linter" lint-imports
}

tests() { python -m pytest -p no:cacheprovider --durations=10 --durations-min=1 "$@"; }

slow_checks_and_tests() {
  local failed=()
  slow_checks
  tests "$@" || failed+=(pytest)
  ((${#failed[@]} == 0))
}

# Two halves run at the same time: jobs of several ranks mostly wait for one another.
one=(tests -m job) other=(tests -m pure)
case ${1-} in
night) one=(tests -m "job or nightly" --nightly) ;;
pure)
  half=(planner search schedule programs report cli) # which takes as long as all others
  one=("${half[@]/#/tests/}" -m pure) other=(tests "${half[@]/#/--ignore=tests/}" -m pure)
  ;;
?*) one=() ;;
esac

begun=$SECONDS
wait "$compiling"
report "compile the searches" "$begun" $?

begun=$SECONDS
if ((${#one[@]})); then
  others=$(mktemp)
  trap 'rm -f "$others"' EXIT
  trap 'kill 0' INT TERM
  slow_checks_and_tests "${other[@]}" >"$others" 2>&1 &
  echo "== pytest ${one[*]}, at the same time as mypy, import-linter, then pytest ${other[*]}"
  tests "${one[@]}"
  report "pytest ${one[*]}" "$begun" $?
  wait $!
  status=$?
  cat "$others"
  report "mypy + import-linter + pytest ${other[*]}" "$begun" "$status"
else
  slow_checks
  begun=$SECONDS
  python -m pytest "$@"
  report pytest "$begun" $?
fi

if ((${#failed[@]})); then
  (IFS=,; echo "== failed: ${failed[*]}" | sed 's/,/, /g')
  exit 1
fi
echo "== everything passed ($SECONDS s)"
