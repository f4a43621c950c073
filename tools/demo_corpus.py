#!/usr/bin/env python3
"""Builds a text corpus without a download: the source files of the Python installation that runs this.

Each line of the JSONL is one source file, ``{"path": ..., "text": ...}``. The same Python and size give the
same corpus, byte for byte.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.schedules.utils.output_files import make_folder, write_text
from megatron.schedules.utils.printable import printable
from tools._parsing import Parser

# Tests and third-party packages: not prose of the language, and not the same on every machine.
_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


def source_files(library: Path) -> list[Path]:
    """Returns the ``*.py`` files under ``library`` without tests and installed packages, in a fixed mixed order.

    The order is that of a hash of each file's path, so that a corpus cut short at any size holds files from
    the whole library and not those at the front of the alphabet.
    """
    found = (path.relative_to(library) for path in library.rglob("*.py"))
    kept = (path for path in found if not _LEFT_OUT.intersection(path.parts))
    return sorted(kept, key=lambda path: hashlib.sha256(path.as_posix().encode()).digest())


def documents(library: Path, limit: int) -> Iterator[tuple[str, str]]:
    """Yields (path, text) of the source files that fit in turn into ``limit`` bytes of UTF-8 text in all."""
    left = limit
    for path in source_files(library):
        try:
            with tokenize.open(library / path) as file:
                text = file.read()
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue  # unreadable here, or in an encoding it does not declare
        size = len(text.encode())
        if text.strip() and size <= left:
            left -= size
            yield path.as_posix(), text


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--megabytes", type=float, default=6.0, help="most text to take, in 10^6 bytes")
    arguments = parser.parse_args(argv)
    most = 1e6 * arguments.megabytes
    if not 0 < most < math.inf:
        parser.error(f"--megabytes must be a number above 0, not {arguments.megabytes:g}")

    library = Path(sysconfig.get_path("stdlib"))
    found = list(documents(library, int(most)))
    if not found:
        parser.error(f"--megabytes: no source file of at most {arguments.megabytes:g} MB in {library}")
    try:
        make_folder(arguments.output.parent)
        write_text(arguments.output, "".join(json.dumps({"path": path, "text": text}) + "\n" for path, text in found))
    except OSError as error:
        parser.error(f"--output: cannot write {arguments.output}: {error.strerror}")
    size = sum(len(text.encode()) for _, text in found)
    said = f"{arguments.output}: {len(found)} source files from {library}, {size / 1e6:.1f} MB of text"
    print(printable(said))
    return 0


if __name__ == "__main__":
    sys.exit(main())
