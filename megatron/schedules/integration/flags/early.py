"""Refuses what the command line alone shows to be wrong, before the seconds that importing torch and Megatron take."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import NoReturn

from megatron.schedules.integration.flags.check import check, refuse
from megatron.schedules.integration.flags.declared import add_arguments, add_stock_arguments
from megatron.schedules.integration.flags.later import TooEarlyError

# With these Megatron takes its settings from elsewhere.
_ELSEWHERE = ("use_checkpoint_args",)


def refuse_early(argv: Sequence[str]) -> None:
    """Make every check of our flags that can be made without Megatron; all are made again on what Megatron parsed.

    Ends with status 2 and one line where something cannot work.
    """
    try:
        args, _ = _parser().parse_known_args(argv)
        args.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if not any(getattr(args, name) for name in _ELSEWHERE):
            check(args)
    except (TooEarlyError, ValueError):  # an odd WORLD_SIZE is Megatron's to refuse
        return


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Of our flags in one line; about its own Megatron says what it says."""
        if message.startswith("argument --pipeline-schedule"):
            refuse(message.removeprefix("argument "))
        raise TooEarlyError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_stock_arguments(parser)
    return add_arguments(parser)
