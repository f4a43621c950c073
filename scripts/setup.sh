#!/usr/bin/env bash
# Makes .venv, with everything that training and the tests need, at the versions of constraints.txt.
#
#     bash scripts/setup.sh                      finds a Python by itself
#     PYTHON=/path/to/python bash scripts/setup.sh
#
# A second run takes a moment: it compares what is installed with what is required. If a run was interrupted, the next
# one starts again from an empty .venv.
set -euo pipefail

# shellcheck source=scripts/_start.sh
source "$(dirname "${BASH_SOURCE[0]}")/_start.sh"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
stamp=$venv/.installed
unfinished=$venv/.installing
log=$venv/setup.log

say() { echo "setup: $*"; }
fail() {
  echo "setup: error: $*" >&2
  exit 1
}

# What an up-to-date .venv is made from; the folder counts because scripts in .venv name it.
fingerprint() {
  (cd "$root" && cat pyproject.toml setup.py constraints.txt scripts/setup.sh scripts/transformer_engine.txt) | sha256sum | cut -d' ' -f1
  echo "$root"
  "$venv/bin/python" -c 'import sys; print(sys.version)' 2>/dev/null
}

up_to_date() {
  [[ -f $stamp && ! -e $unfinished ]] && [[ $(cat "$stamp") == "$(fingerprint)" ]]
}

# One set-up at a time in one checkout.
if command -v flock >/dev/null; then
  exec 9<"$root"
  flock -n 9 || {
    say "another set-up is running in this folder; waiting for it"
    flock 9
  }
fi

if up_to_date; then
  say ".venv is up to date"
  exit 0
fi

started=$SECONDS

if [[ -e $unfinished ]]; then
  say "an earlier set-up was interrupted; making .venv again"
  rm -rf "$venv"
elif [[ -d $venv ]] && ! "$venv/bin/python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
  say "the Python of .venv does not run or is too old; making .venv again"
  rm -rf "$venv"
fi

if [[ ! -d $venv ]]; then
  # shellcheck source=scripts/_find_python.sh
  source "$root/scripts/_find_python.sh"
  python=$(find_python) || exit 1
  say "making .venv with $python ($("$python" -V 2>&1))"
  mkdir -p "$venv"
  touch "$unfinished"
  "$python" -m venv "$venv" || fail "$python -m venv failed; see the lines above"
fi
touch "$unfinished"

# run_pip <arguments>: runs pip with its output in the log, and prints its progress every 15 s.
run_pip() {
  local begun=$SECONDS report=15 child
  "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@" >>"$log" 2>&1 9<&- &
  child=$!
  # shellcheck disable=SC2064  # expands now: this child is meant
  trap "kill $child 2>/dev/null; exit 130" INT TERM
  while kill -0 "$child" 2>/dev/null; do
    sleep 0.2
    if ((SECONDS - begun >= report)); then
      report=$((report + 15))
      say "  $((SECONDS - begun)) s: $(grep -E '^ *(Collecting|Downloading|Using cached|Installing|Building)' "$log" |
        tail -n 1 | sed -E 's/^ +//; s/(https?|file):[^ ]*\///; s/(Installing collected packages).*/\1/' | cut -c1-90)"
    fi
  done
  trap - INT TERM
  if ! wait "$child"; then
    tail -n 25 "$log" >&2
    # pip undoes what it could not finish, so .venv is usable. Only a killed pip leaves it broken.
    rm -f "$unfinished"
    fail "pip could not install the packages; the lines above are the end of $log"
  fi
}

if [[ -f $stamp ]]; then
  say "bringing .venv up to date with pyproject.toml and constraints.txt"
else
  say "installing PyTorch, megatron-core and the test tools into .venv"
  say "this takes 2 to 10 minutes, depending on the network, and 6 GB of disk (PyTorch brings its CUDA libraries)"
fi
: >"$log"
isolation=(--no-build-isolation)
if "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 14))'; then
  # megatron-core has no wheel for this Python: pip builds it with the build tools that it requires.
  say "megatron-core is built from source for this Python, which needs a C++ compiler"
  isolation=()
fi
run_pip install -c "$root/constraints.txt" setuptools
run_pip install -c "$root/constraints.txt" "${isolation[@]}" -e "${root}[megatron,pictures,docs,dev]"

# Transformer Engine's Python at several versions, 0.5 to 1.3 MB each, for tests without a GPU. Each has a folder of its
# own, which is on no path until a test or a user puts it there.
while read -r version; do
  folder=$venv/transformer_engine/$version
  [[ $version == [0-9]* && ! -d $folder ]] || continue
  rm -rf "$folder.part"
  run_pip install --no-deps --only-binary :all: --no-compile --target "$folder.part" "transformer_engine==$version"
  mv "$folder.part" "$folder"
done <"$root/scripts/transformer_engine.txt"

# The stamp is written last, and whole: nothing that was cut short looks finished.
fingerprint >"$stamp.new"
mv "$stamp.new" "$stamp"
rm -f "$unfinished"
say ".venv is ready after $((SECONDS - started)) s"
