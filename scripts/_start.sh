# shellcheck shell=bash
# Every script sources this first.

# With CDPATH, cd may go to a folder of the same name elsewhere, and prints its path.
unset CDPATH

# --help prints the comment at the head of the script, before anything runs.
for _argument in "$@"; do
  [[ $_argument == -h || $_argument == --help ]] || continue
  while read -r _line && [[ $_line == '#'* ]]; do
    _line=${_line#'#'}
    [[ $_line == '!'* || $_line == SBATCH* ]] || printf '%s\n' "${_line# }"
  done <"${BASH_SOURCE[1]}"
  exit 0
done
