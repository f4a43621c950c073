"""An argument parser for tools without click: it refuses in one line, as all our programs do."""

from __future__ import annotations

import argparse
from typing import NoReturn

from megatron.schedules.utils.errors import one_line


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that prints one line for an error; only ``--help`` prints the usage."""

    def error(self, message: str) -> NoReturn:
        """Prints one line on standard error and exits with status 2."""
        self.exit(2, f"{self.prog}: error: {one_line(message)}\n")
