"""Reads ``megatron_flags.toml``: what becomes of each flag of Megatron's own parser."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core.package_info import __shortversion__

from megatron.schedules.integration.touch_points import minor


class Line(NamedTuple):
    """A flag with the value that is tried.

    Args:
        words: the flag and its value.
        needs: other flags, without which it means nothing.
    """

    words: tuple[str, ...]
    needs: tuple[str, ...]

    @property
    def flag(self) -> str:
        return self.words[0]


class Group(NamedTuple):
    """Flags of which the same is said.

    Args:
        kind: "tried", "refused" or "not_tried".
        what: a title, or the reason.
        lines: a flag each.
        common: flags that all of its jobs have.
        without: flags of every job that they must not have.
        ranks: processes of its jobs.
        te: whether they have Transformer Engine's Python.
        capability: what this says of the GPU; empty for what it says by itself.
        together: whether one job has all of them.
    """

    kind: str
    what: str
    lines: tuple[Line, ...]
    common: tuple[str, ...] = ()
    without: str = ""
    ranks: int = 2
    te: bool = False
    capability: str = ""
    together: bool = False

    @property
    def jobs(self) -> dict[str, list[str]]:
        """Flags of each job, by what it tries."""
        return {self.what: self.flags(*self.lines)} if self.together else self.alone

    @property
    def alone(self) -> dict[str, list[str]]:
        """Flags of a job for each line."""
        return {line.flag: self.flags(line) for line in self.lines}

    def flags(self, *lines: Line) -> list[str]:
        """Those of one job that tries ``lines``: what is tried comes last, and counts where it is given twice."""
        return [*self.common, *(word for line in lines for word in (*line.needs, *line.words))]


def groups(*kinds: str) -> list[Group]:
    """Those of the table that are of ``kinds``, with the flags that this version of Megatron has."""
    table = tomllib.loads(Path(__file__).with_name("megatron_flags.toml").read_text())
    return [_group(kind, dict(entry)) for kind in kinds or table for entry in table.get(kind, ())]


def _group(kind: str, entry: dict[str, Any]) -> Group:
    title = entry.pop("what", None) or entry.pop("why")
    common = tuple(shlex.split(entry.pop("with", "")))
    return Group(kind, title, tuple(_lines(entry.pop("flags"))), common, **entry)


def _lines(text: str) -> Iterator[Line]:
    for line in text.strip().splitlines():
        words, needs, when, *_ = [*line.split(" | "), "", ""]
        if _holds(when):
            yield Line(tuple(shlex.split(words)), tuple(shlex.split(needs)))


def _holds(when: str) -> bool:
    """Whether ``since VERSION`` or ``before VERSION`` holds for this Megatron; both are true where nothing is said."""
    word, _, version = when.partition(" ")
    assert word in ("", "since", "before"), when
    return not word or (minor(__shortversion__) >= minor(version)) == (word == "since")
