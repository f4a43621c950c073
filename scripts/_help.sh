# shellcheck shell=bash
# What a script sources first, for its flag --help: prints the comment at the script's head and ends, before anything runs.
for _argument in "$@"; do
  [[ $_argument == -h || $_argument == --help ]] || continue
  while read -r _line && [[ $_line == '#'* ]]; do
    _line=${_line#'#'}
    [[ $_line == '!'* ]] || printf '%s\n' "${_line# }"
  done <"${BASH_SOURCE[1]}"
  exit 0
done
