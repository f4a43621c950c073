# shellcheck shell=bash
# Checks of what comes from outside; sourced by job.sh, train.sh and sweep.sh, which set `program` for the errors.
#
# Bash evaluates the content of a variable in arithmetic, commands in array subscripts included: with x='a[$(command)]',
# `((x < 1))` runs the command. So no value from the environment, a file or a command is counted with before it is checked.

fail() {
  echo "${program:-job}: error: $*" >&2
  exit 2
}

# is_whole_number <text> <least> <most>: digits only, listed, because a range such as 0-9 depends on the locale. A leading
# zero is refused because arithmetic takes it for octal. Ten digits cannot overflow.
is_whole_number() {
  [[ $1 =~ ^(0|[123456789][0123456789]{0,9})$ ]] && (($1 >= $2 && $1 <= $3))
}

# whole_number <variable> <least> [<most>]: fails where the variable of that name does not hold such a number.
whole_number() {
  local most=${3:-999999999}
  is_whole_number "${!1-}" "$2" "$most" ||
    fail "$1=$(shown "${!1-}") is not a whole number from $2 to $most; give plain digits, without leading zeros"
}

# shown <text>: one short line of it, quoted as a shell would.
shown() {
  local text
  printf -v text %q "$1"
  echo "${text:0:60}"
}

# number_in <file> <what to do if it holds anything else> [<word that stands for 0>]: prints the number, 0 without a file.
number_in() {
  local text
  [[ -f $1 ]] || {
    echo 0
    return
  }
  # All there is of it: a read that comes to an end before the file does has met a NUL byte or too much.
  ! read -r -d '' -n 64 text 2>/dev/null <"$1" || text="$text..."
  text=${text%$'\r'}
  [[ -z ${3:-} || $text != "$3" ]] || text=0
  is_whole_number "$text" 0 999999999 || fail "$1 holds $(shown "$text") and not a whole number: $2"
  echo "$text"
}

# source_model <file>: runs a model file and checks the number of GPUs it sets. A bare name would be looked up on the PATH.
source_model() {
  local file=$1
  [[ $file == */* ]] || file=./$file
  # shellcheck source=examples/slurm/models/21B.sh
  source "$file"
  whole_number GPUS 1
}
