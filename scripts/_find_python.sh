# shellcheck shell=bash
# Finds a Python that .venv can be made with. Sourced by setup.sh; defines find_python.
#
# Each candidate is run before it is used: `python3` may be too old, a pyenv shim may refuse to run, and a
# distribution's Python may lack the venv module.

# Prints paths that may be a Python, the most likely first.
_python_candidates() {
  local name folder line conda
  for name in python3.12 python3.13 python3.14 python3 python; do
    type -aP "$name" 2>/dev/null || true
  done
  for folder in /usr/local/bin /usr/bin /opt/homebrew/bin; do
    printf '%s\n' "$folder"/python3.1[2-9]
  done
  # pyenv
  for folder in "${PYENV_ROOT:-}" "${HOME:-}/.pyenv" "$(pyenv root 2>/dev/null || true)"; do
    [[ -n $folder ]] && printf '%s\n' "$folder"/versions/*/bin/python3
  done
  # conda: the active installation, the usual places, and the environments that conda lists
  conda=${CONDA_EXE:-$(type -P conda || true)}
  for folder in "${CONDA_PREFIX:-}" "${conda:+${conda%/*/*}}" "${HOME:-}"/{mini,ana}conda3 \
    "${HOME:-}"/{miniforge3,mambaforge,micromamba} /opt/conda /opt/{mini,ana}conda3 /opt/miniforge3; do
    [[ -n $folder ]] && printf '%s\n' "$folder"/bin/python3 "$folder"/envs/*/bin/python3
  done
  if [[ -r ${HOME:-}/.conda/environments.txt ]]; then
    while read -r line; do printf '%s\n' "$line/bin/python3"; done <"$HOME/.conda/environments.txt"
  fi
  # uv
  for folder in "${UV_PYTHON_INSTALL_DIR:-}" "${XDG_DATA_HOME:-${HOME:-}/.local/share}/uv/python"; do
    [[ -n $folder ]] && printf '%s\n' "$folder"/*/bin/python3
  done
  if type -P uv >/dev/null; then
    uv python list --only-installed 2>/dev/null | awk '{print $2}' || true
  fi
}

# Prints the minor version of a CPython 3 that runs and can make environments; fails otherwise. A free-threaded build
# (abiflags "t") is refused, because there are no wheels for it.
_python_minor() {
  # `timeout`, because a shim may wait for input; `</dev/null`, so that it does not read ours.
  timeout 20 "$1" -I -c '
import sys
if sys.version_info[0] != 3 or sys.implementation.name != "cpython" or "t" in sys.abiflags: sys.exit(1)
if sys.version_info[1] >= 12: import ensurepip, venv
print(sys.version_info[1])
' </dev/null 2>/dev/null
}

# Prints the Python to use: 3.12 if there is one, else 3.13 (both have wheels for every pinned version),
# else a newer one. If $PYTHON is set, it is the only candidate.
find_python() {
  local candidate minor seen=" " tried="" best="" best_rank=99 rank
  while read -r candidate; do
    [[ -x $candidate && ! -d $candidate && $seen != *" $candidate "* ]] || continue
    seen+="$candidate "
    # A shim may print more than a number, and bash arithmetic would run it.
    if ! minor=$(_python_minor "$candidate") || [[ ! $minor =~ ^[123456789][0123456789]?$ ]]; then
      tried+="  $candidate does not run, or cannot make environments (venv, ensurepip)"$'\n'
      continue
    fi
    if ((minor < 12)); then
      tried+="  $candidate is Python 3.$minor"$'\n'
      continue
    fi
    rank=$((minor - 12))
    if ((rank < best_rank)); then
      best=$candidate best_rank=$rank
    fi
    ((rank == 0)) && break
  done < <(if [[ -n ${PYTHON:-} ]]; then type -P "$PYTHON"; else _python_candidates; fi)

  if [[ -z $best ]]; then
    {
      if [[ -n ${PYTHON:-} ]]; then
        echo "setup: error: PYTHON=$PYTHON is not a Python 3.12 or newer that runs and has the venv module."
      else
        echo "setup: error: no Python 3.12 or newer found on PATH, nor in pyenv, conda or uv."
      fi
      [[ -n $tried ]] && printf 'Looked at:\n%s' "$tried"
      echo "Install Python 3.12 and run this again, for example by one of"
      echo "  apt-get install python3.12 python3.12-venv     (Debian, Ubuntu)"
      echo "  dnf install python3.12                         (Fedora, RHEL)"
      echo "  pyenv install 3.12    uv python install 3.12    conda create -n py312 python=3.12"
    } >&2
    return 1
  fi
  echo "$best"
}
