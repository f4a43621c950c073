#!/usr/bin/env bash
# Builds the documentation site. Every warning is an error, and all of them are shown.
#
#     bash scripts/build_docs.sh                 to build/docs/index.html
#     bash scripts/build_docs.sh DIRECTORY       to DIRECTORY/index.html
#
# It needs the packages of the extra [docs], which scripts/setup.sh installs, but neither torch nor Megatron.
# PYTHON=/path/to/python chooses another Python than .venv's. DOCS_SOURCE_URL=https://.../blob/main is where links to
# files of the repository lead; without it they lead to the files of this checkout.
set -euo pipefail

# shellcheck source=scripts/_start.sh
source "$(dirname "${BASH_SOURCE[0]}")/_start.sh"
target=$(realpath -m -- "${1:-$(dirname "${BASH_SOURCE[0]}")/../build/docs}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
if ! type -P "$python" >/dev/null; then
  echo "build_docs.sh: error: there is no Python $python; run scripts/setup.sh, or set PYTHON" >&2
  exit 2
fi
exec "$python" -m sphinx --quiet --fail-on-warning --keep-going -b html docs "$target"
