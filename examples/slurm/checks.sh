# shellcheck shell=bash
# Checks of values from outside; sourced by job.sh, train.sh and sweep.sh, which set `program` for the errors.
#
# In arithmetic bash evaluates the content of variables, even commands in array subscripts: with x='a[$(command)]',
# `((x < 1))` runs the command. So each value from the environment, a file or a command is checked before arithmetic.

fail() {
  echo "${program:-job}: error: $*" >&2
  exit 2
}

# is_whole_number <text> <least> <most>: digits only. They are listed, because a range such as 0-9 depends on the
# locale. A leading zero is refused, because it means octal in arithmetic. Ten digits cannot overflow.
is_whole_number() {
  [[ $1 =~ ^(0|[123456789][0123456789]{0,9})$ ]] && (($1 >= $2 && $1 <= $3))
}

# whole_number <variable> <least> [<most>]: fails unless the variable of that name holds such a number.
whole_number() {
  local most=${3:-999999999}
  is_whole_number "${!1-}" "$2" "$most" ||
    fail "$1=$(shown "${!1-}") is not a whole number from $2 to $most; give plain digits, without leading zeros"
}

# shown <text>: prints the text as one short line, quoted for a shell.
shown() {
  local text
  printf -v text %q "$1"
  echo "${text:0:60}"
}

# number_in <file> <advice if it holds anything else> [<word that means 0>]: prints the number in the file, 0 without a
# file.
number_in() {
  local text
  [[ -f $1 ]] || {
    echo 0
    return
  }
  # Reads the whole file: if read succeeds, it stopped before the end, at a NUL byte or after 64 characters.
  ! read -r -d '' -n 64 text 2>/dev/null <"$1" || text="$text..."
  text=${text%$'\r'}
  [[ -z ${3:-} || $text != "$3" ]] || text=0
  is_whole_number "$text" 0 999999999 || fail "$1 holds $(shown "$text") and not a whole number: $2"
  echo "$text"
}

# source_model <file>: runs a model file and checks its number of GPUs. A bare name would be searched on the PATH.
source_model() {
  local file=$1
  [[ $file == */* ]] || file=./$file
  # shellcheck source=examples/slurm/models/21B.sh
  source "$file"
  whole_number GPUS 1
}
