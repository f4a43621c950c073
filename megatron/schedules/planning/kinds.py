"""Kinds of pass, in one table: what each waits for, makes, takes of the memory and gives back.

Whatever orders, times, checks, draws or carries out passes reads it here. It holds no numbers, no colours, nothing of
torch, and nothing of how a schedule is found. docs/architecture.md says how to add a kind.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from enum import Enum, StrEnum
from typing import NamedTuple

from megatron.schedules.planning.placement import Placement


class Kind(StrEnum):
    """What a pass computes, by the field's letter; :data:`KINDS` says the rest."""

    F = "F"
    I = "I"  # noqa: E741 - the field's letter for the input gradient
    W = "W"
    B = "B"


class At(Enum):
    """Where a pass that is needed stands, seen from the stage of the pass that needs it."""

    SAME = "the same stage"
    PREVIOUS = "the stage before"
    NEXT = "the stage after"
    EVERY_RANK = "the first stage of every rank"


class Need(NamedTuple):
    """One of ``kinds``, on the same microbatch, must have ended.

    Where there is no such stage nothing must, nor where all of ``kinds`` are optional and the schedule has none.
    """

    kinds: tuple[Kind, ...]
    at: At


class Result(StrEnum):
    """What one stage hands to another: its output, or the gradient of its input."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"


class Share(StrEnum):
    """The parts of a stage's activations that come and go as one; :class:`.costs.StageCosts` has their sizes."""

    FORWARD = "from F until I"
    WEIGHTS = "from I until W"


class Resource(StrEnum):
    """What a pass keeps busy. Those of one resource of a rank run one at a time."""

    COMPUTE = "compute"
    COPY = "copy"


class Row(NamedTuple):
    """One kind of pass.

    Args:
        meaning: in words, for legends.
        needs: what must have ended before.
        makes: the tensor that it hands on: an activation to the next stage, a gradient to the one before.
        takes, gives: of the memory; what it takes is there from its start, what it gives back until its end.
        resource: what it keeps busy.
        filler: whether no other pass waits for it.
        ends_gradients: whether the microbatch's weight gradients of the stage are complete after it.
        parts: the kinds that it is made of, where it is several in one.
        optional: whether a stage may do without it.
    """

    meaning: str
    needs: tuple[Need, ...]
    makes: Result | None = None
    takes: tuple[Share, ...] = ()
    gives: tuple[Share, ...] = ()
    resource: Resource = Resource.COMPUTE
    filler: bool = False
    ends_gradients: bool = False
    parts: tuple[Kind, ...] = ()
    optional: bool = False


_SINGLE = {
    Kind.F: Row(
        "forward",
        needs=(Need((Kind.F,), At.PREVIOUS),),
        makes=Result.ACTIVATION,
        takes=(Share.FORWARD,),
    ),
    Kind.I: Row(
        "input gradient",
        needs=(Need((Kind.F,), At.SAME), Need((Kind.I, Kind.B), At.NEXT)),
        makes=Result.GRADIENT,
        takes=(Share.WEIGHTS,),
        gives=(Share.FORWARD,),
    ),
    Kind.W: Row(
        "weight gradient",
        needs=(Need((Kind.I,), At.SAME),),
        gives=(Share.WEIGHTS,),
        filler=True,
        ends_gradients=True,
    ),
}


def _whole(*parts: Kind) -> Row:
    """``parts`` in one, each needing what no earlier one of them is."""
    rows = [_SINGLE[part] for part in parts]
    needs = [need for row in rows for need in row.needs]
    taken = [share for row in rows for share in row.takes]
    given = [share for row in rows for share in row.gives]
    return Row(
        f"{' and '.join(parts)} in one",
        needs=tuple(need for need in needs if need.at is not At.SAME or not {*need.kinds} & {*parts}),
        makes=next((row.makes for row in rows if row.makes), None),
        takes=tuple(share for share in taken if share not in given),
        gives=tuple(share for share in given if share not in taken),
        resource=rows[0].resource,
        filler=all(row.filler for row in rows),
        ends_gradients=any(row.ends_gradients for row in rows),
        parts=parts,
    )


KINDS: Mapping[Kind, Row] = {**_SINGLE, Kind.B: _whole(Kind.I, Kind.W)}

# A whole stands for each of its parts.
WHOLES: Mapping[tuple[Kind, ...], Kind] = {row.parts: kind for kind, row in KINDS.items() if row.parts}
# What every stage does with every microbatch, the backward split.
SPLIT = tuple(kind for kind, row in KINDS.items() if not row.parts and not row.optional)
# The kinds that count as one where others wait: a whole as the first of its parts.
COUNTS_AS: Mapping[Kind, Kind] = {kind: row.parts[0] if row.parts else kind for kind, row in KINDS.items()}

StageKind = tuple[int, Kind]
"""(stage, kind): a pass, whatever its microbatch."""


def sources(kind: Kind, stage: int, placement: Placement) -> list[tuple[int, tuple[Kind, ...]]]:
    """What a pass of ``kind`` on ``stage`` waits for: stages, and the kinds of which one must have ended there."""
    found: list[tuple[int, tuple[Kind, ...]]] = []
    for kinds, at in KINDS[kind].needs:
        where = {
            At.SAME: [stage],
            At.PREVIOUS: [stage - 1] if stage else [],
            At.NEXT: [stage + 1] if stage < placement.last_stage else [],
            At.EVERY_RANK: [placement.stages_of(rank)[0] for rank in range(placement.ranks)],
        }[at]
        found += [(each, kinds) for each in where]
    return found


def followers(placement: Placement, kinds: Collection[Kind]) -> dict[StageKind, list[StageKind]]:
    """For each pass of a microbatch that has passes of ``kinds`` alone, those that may start once it has ended.

    What waits for another stage as well as for its own has ended its own long before, and follows the other.
    """
    found: dict[StageKind, list[StageKind]] = defaultdict(list)
    for stage in range(placement.stages):
        for kind in (kind for kind in KINDS if kind in kinds):
            needed = sources(kind, stage, placement)
            elsewhere = [source for source in needed if source[0] != stage]
            for source, alternatives in elsewhere or needed:
                for each in alternatives:
                    if each in kinds:
                        found[source, each].append((stage, kind))
    return found


def in_dependency_order(placement: Placement, kinds: Collection[Kind]) -> Iterator[StageKind]:
    """The passes of one microbatch that has passes of ``kinds``, each right after what it waits for, fillers first."""
    after = followers(placement, kinds)
    waits = Counter(work for works in after.values() for work in works)
    ready = [(stage, kind) for stage in range(placement.stages) for kind in kinds if not waits[stage, kind]]
    while ready:
        work = ready.pop()
        yield work
        waits.subtract(after[work])
        ready += sorted((each for each in after[work] if not waits[each]), key=lambda each: KINDS[each[1]].filler)
