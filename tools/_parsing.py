"""The parser of tools that have no dependency on click: it refuses in one line, as all our programs do."""

from __future__ import annotations

import argparse
from typing import NoReturn

from megatron.schedules.utils.errors import one_line


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that says what is wrong, without its usage: ``--help`` prints that."""

    def error(self, message: str) -> NoReturn:
        """End with status 2 after one line on standard error."""
        self.exit(2, f"{self.prog}: error: {one_line(message)}\n")
