"""Early checks of the command line, before torch and Megatron are imported, which takes seconds."""

from __future__ import annotations

import argparse
import difflib
import re
from argparse import Namespace
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from megatron.schedules.estimate.bounds import BOUNDS
from megatron.schedules.estimate.layer_pattern import EXPRESSION
from megatron.schedules.integration.flags.check import check_settings, check_without_search, checked
from megatron.schedules.integration.flags.declared import FLAGS, OURS, add_arguments, add_stock_arguments
from megatron.schedules.integration.flags.environment import check_environment, whole_variable
from megatron.schedules.integration.flags.refuse import refuse
from megatron.schedules.integration.flags.settings_without_flags import settings_without_flags
from megatron.schedules.job.spec import JobSpec
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.late_imports import TooEarlyError

# Similarity from which a word counts as a misspelt flag of ours. No Megatron flag reaches it.
LIKE = 0.85
# With these flags Megatron reads its settings from another source.
_ELSEWHERE = ("use_checkpoint_args",)


def refuse_early(
    argv: Sequence[str], known: Collection[str] = (), arguments: Mapping[str, Any] = MappingProxyType({})
) -> JobSpec | None:
    """Runs every check of our flags that needs neither Megatron nor a search.

    All checks run again after Megatron has parsed its flags.

    If something cannot work, exits with status 2 and one line.

    Args:
        argv: the command line.
        known: flags that are valid although they look like misspelt flags of ours: those of Megatron's parser, which
            reads the command line next.
        arguments: arguments of ``install()``, by name.

    Returns:
        The job; None without a schedule, and if a check needs Megatron.
    """
    args = Namespace(pipeline_schedule=None)
    try:
        settings, parser = settings_without_flags(arguments), stock_parser()
        parser.set_defaults(**settings)
        args, others = parser.parse_known_args(argv)
        _refuse_misspelt({word.partition("=")[0] for word in others}.difference(known))
        if args.pipeline_schedule is not None:
            check_environment()
        if not known and settings.get("pipeline_schedule") == args.pipeline_schedule is not None:
            check_settings(args)  # the other words may be those of another framework
            return None
        args.world_size = whole_variable("WORLD_SIZE", 1)
        if not any(getattr(args, name) for name in _ELSEWHERE):
            spec = checked(args)
            if spec is not None and not known:
                check_without_search(spec)
                return spec
    except TooEarlyError:
        return None
    except _FlagError as error:
        # Prints one line if a flag of ours is given; otherwise Megatron prints its own message.
        if any(word.startswith(FLAGS["schedule"]) for word in (*argv, error.flag)):
            refuse(str(error))
    except PlanError as error:
        if args.pipeline_schedule is not None:
            refuse(str(error))
    return None


def _refuse_misspelt(words: Iterable[str]) -> None:
    """Refuses misspelt flags of ours. Megatron would only call them unrecognized, after its whole usage text."""
    for word in words:
        if close := difflib.get_close_matches(word, (FLAGS["schedule"], *OURS), n=1, cutoff=LIKE):
            refuse(f"{word} is unknown: did you mean {close[0]}?")


class _FlagError(Exception):
    """A flag that the parser refuses.

    Args:
        message: the parser's message.
    """

    def __init__(self, message: str) -> None:
        text = message.removeprefix("argument ")
        self.flag = text.partition(":")[0]
        if found := re.fullmatch(r"(\S+): invalid (int|\w+_freq_type) value: (.*)", text):
            text = f"{self.flag} must be {self._works(found[2])}, not {found[3]}"
        super().__init__(text)

    def _works(self, kind: str) -> str:
        if kind != "int":
            return EXPRESSION
        least, most = BOUNDS.get(self.flag, (0, None))
        return f"a whole number, {least} or more" if most is None else f"a whole number from {least} to {most}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _FlagError(message)


def stock_parser() -> argparse.ArgumentParser:
    """Parser of our flags, and of the Megatron flags that our checks read."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_stock_arguments(parser)
    return add_arguments(parser)
