# shellcheck shell=bash
# What a script sources first.

# With it, cd may go to a folder of the same name elsewhere, and prints where.
unset CDPATH

# --help: the comment at the script's head, before anything runs.
for _argument in "$@"; do
  [[ $_argument == -h || $_argument == --help ]] || continue
  while read -r _line && [[ $_line == '#'* ]]; do
    _line=${_line#'#'}
    [[ $_line == '!'* || $_line == SBATCH* ]] || printf '%s\n' "${_line# }"
  done <"${BASH_SOURCE[1]}"
  exit 0
done
