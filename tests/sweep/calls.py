"""The flags of a program as its parser declares them: a new flag is found by itself."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import click

from tests.sweep.values import Kind

# Words that stand in metavars for a value, in capitals; small ones stand for themselves.
_WORDS = {
    Kind.NUMBER: (
        "D N V X S K L A B F I W COMM LATENCY MESSAGES COST COLUMNS GIB GBPS GPUS GB/S STAGE FACTOR CHUNKS".split()
    ),
    Kind.NAME: ["NAME", "KEY"],
    Kind.INPUT: ["FILE", "CSV", "JSON", "LOG"],
    Kind.OUTPUT: ["PREFIX"],
    Kind.FOLDER: ["DIR"],
    Kind.SIZE: ["SIZE"],
}
# Parts of a metavar that say how a value goes on.
_GRAMMARS = {":CHUNKS": Kind.CHUNKS, "=GB/S": Kind.SPEED, ":A-B": Kind.SPAN, "xGIB": Kind.SIZE}
_NUMBERS = (int, float)


@dataclass(frozen=True)
class Flag:
    """One flag of a program.

    Args:
        name: as it is written; empty for an argument without one.
        kinds: of value that it takes; none where its declaration does not tell.
        choices: words that it knows.
    """

    name: str
    kinds: frozenset[Kind]
    choices: tuple[str, ...] = ()

    @property
    def is_switch(self) -> bool:
        """Whether it takes no value."""
        return self.kinds == {Kind.SWITCH}


def of_click(command: click.Command) -> list[Flag]:
    """The flags of ``command``, without those of its subcommands."""
    return [_of_click(option) for option in command.params if isinstance(option, click.Option)]


def of_argparse(parser: argparse.ArgumentParser) -> list[Flag]:
    """The flags of ``parser``, and what it takes without one."""
    return [_of_action(action) for action in parser._actions if not isinstance(action, argparse._HelpAction)]


def parser_of(main: Callable[[list[str]], Any]) -> argparse.ArgumentParser:
    """The largest parser that ``main`` reads its arguments with."""
    used: list[argparse.ArgumentParser] = []
    with _noted(used), redirect_stderr(StringIO()), redirect_stdout(StringIO()), suppress(SystemExit):
        main(["--no-such-flag"])
    return max(used, key=lambda parser: len(parser._actions))


@contextmanager
def _noted(used: list[argparse.ArgumentParser]) -> Iterator[None]:
    stock = argparse.ArgumentParser.parse_known_args

    def noting(self: argparse.ArgumentParser, *args: Any, **named: Any) -> Any:
        used.append(self)
        return stock(self, *args, **named)

    argparse.ArgumentParser.parse_known_args = noting  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        argparse.ArgumentParser.parse_known_args = stock  # type: ignore[method-assign]


def _of_click(option: click.Option) -> Flag:
    name = max(option.opts, key=len)
    if option.is_flag:
        return Flag(name, frozenset({Kind.SWITCH}))
    kind, choices = option.type, ()
    if isinstance(kind, click.Choice):
        return Flag(name, frozenset({Kind.NAME}), tuple(map(str, kind.choices)))
    if isinstance(kind, click.types.IntParamType | click.types.FloatParamType):
        return Flag(name, frozenset({Kind.NUMBER}))
    is_path = isinstance(kind, click.Path) or getattr(kind, "func", None) is Path
    kinds, choices = _of_metavar(name, option.metavar, is_path)
    return Flag(name, kinds, choices)


def _of_action(action: argparse.Action) -> Flag:
    name = max(action.option_strings, key=len, default="")
    if action.nargs == 0:
        return Flag(name, frozenset({Kind.SWITCH}))
    if action.choices is not None:
        return Flag(name, frozenset({Kind.NAME}), tuple(map(str, action.choices)))
    if action.type in _NUMBERS:
        return Flag(name, frozenset({Kind.NUMBER}))
    metavar = action.metavar if isinstance(action.metavar, str) else None
    return Flag(name, *_of_metavar(name, metavar, action.type is Path))


def _of_metavar(name: str, metavar: str | None, is_path: bool) -> tuple[frozenset[Kind], tuple[str, ...]]:
    """The kinds, and the words, that ``metavar`` tells; no kind at all where a part of it is not known."""
    metavar = metavar or ""
    plain = re.sub(r"\.(csv|json)|x(?=GIB)", "|", metavar)
    words = [word for word in re.split(r"[|,\[\].=:\-]+", plain) if word]
    choices = tuple(word for word in words if not word.isupper())
    kinds = {kind for kind, known in _WORDS.items() if set(words) & set(known)}
    kinds |= {kind for part, kind in _GRAMMARS.items() if part in metavar}
    known = {word for group in _WORDS.values() for word in group}
    if "," in metavar:
        kinds.add(Kind.LIST)
    if choices:
        kinds.add(Kind.FORM if name == "--format" else Kind.NAME)
    if not is_path and Kind.INPUT in kinds and Kind.NAME not in kinds:
        is_path = True
    if is_path and ("output" in name or "save" in name):
        return frozenset({Kind.OUTPUT}), ()
    if is_path and not kinds:
        return frozenset({Kind.INPUT, Kind.FOLDER}), ()
    if any(word not in known for word in words if word not in choices):
        return frozenset(), choices
    return frozenset(kinds), choices
