"""Kinds of pass, in one table: what each waits for, makes, takes of the memory and gives back.

Whatever orders, times, checks, draws or carries out passes reads it here. It holds no numbers, no colours, nothing of
torch, and nothing of how a schedule is found. docs/architecture.md says how to add a kind.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from enum import Enum, StrEnum
from typing import NamedTuple

from megatron.schedules.schedule.placement import Placement


class Kind(StrEnum):
    """What a pass computes, by the field's letter; :data:`KINDS` says the rest."""

    F = "F"
    I = "I"  # noqa: E741 - the field's letter for the input gradient
    W = "W"
    B = "B"
    S = "S"
    T = "T"
    R = "R"
    O = "O"  # noqa: E741 - the field's letter for offloading
    L = "L"


class At(Enum):
    """Where a pass that is needed stands, seen from the stage of the pass that needs it."""

    SAME = "the same stage"
    PREVIOUS = "the stage before"
    NEXT = "the stage after"
    LAST = "the last stage"
    EVERY_RANK = "every rank's last stage, for the last stage of all"


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
    """The parts of a stage's activations that come and go as one; :class:`.StageCosts` has their sizes."""

    FORWARD = "from F until I"
    WEIGHTS = "from I until W"
    VOCABULARY = "from S until T"
    RECOMPUTED = "from F or, where it comes, R until I"
    OFFLOADED = "from F until O and from L until I, where these come"


class Resource(StrEnum):
    """What a pass keeps busy. Those of one resource of a rank run one at a time.

    A copy takes no time of computing. One to the host begins as soon as what it needs has ended, and its place in the
    order is where computing waits for its end; one from the host begins at its place, and who needs it waits. So both
    are one thing with time running the other way.
    """

    COMPUTE = "computing"
    TO_HOST = "copies to the host"
    FROM_HOST = "copies from the host"


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
        optional: whether a stage may do without it, for any microbatch.
        spares: what the stage's forward does not keep where this comes.
        returns: the kind without which it is of no use, on the same stage.
        of_ranks: whether each rank does it for every microbatch, all ranks or none; written with its last stage.
        in_evaluation: whether it is done where there is no backward.
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
    spares: tuple[Share, ...] = ()
    returns: Kind | None = None
    of_ranks: bool = False
    in_evaluation: bool = False


_SINGLE = {
    Kind.F: Row(
        "forward",
        needs=(Need((Kind.F,), At.PREVIOUS),),
        makes=Result.ACTIVATION,
        takes=(Share.FORWARD, Share.RECOMPUTED, Share.OFFLOADED),
        in_evaluation=True,
    ),
    Kind.I: Row(
        "input gradient",
        needs=(
            Need((Kind.F,), At.SAME),
            Need((Kind.I, Kind.B), At.NEXT),
            Need((Kind.R,), At.SAME),
            Need((Kind.L,), At.SAME),
            Need((Kind.S,), At.EVERY_RANK),
        ),
        makes=Result.GRADIENT,
        takes=(Share.WEIGHTS,),
        gives=(Share.FORWARD, Share.RECOMPUTED, Share.OFFLOADED),
    ),
    Kind.W: Row(
        "weight gradient",
        needs=(Need((Kind.I,), At.SAME),),
        gives=(Share.WEIGHTS,),
        filler=True,
        ends_gradients=True,
    ),
    Kind.S: Row(
        "part of the output layer",
        needs=(Need((Kind.F,), At.LAST),),
        takes=(Share.VOCABULARY,),
        optional=True,
        of_ranks=True,
        in_evaluation=True,
    ),
    Kind.T: Row(
        "its weight gradient",
        needs=(Need((Kind.S,), At.SAME), Need((Kind.I, Kind.B), At.LAST)),
        gives=(Share.VOCABULARY,),
        filler=True,
        ends_gradients=True,
        optional=True,
        of_ranks=True,
    ),
    Kind.R: Row(
        "forward again",
        needs=(Need((Kind.F,), At.SAME),),
        takes=(Share.RECOMPUTED,),
        optional=True,
        spares=(Share.RECOMPUTED,),
    ),
    Kind.O: Row(
        "offloaded to the host",
        needs=(Need((Kind.F,), At.SAME),),
        gives=(Share.OFFLOADED,),
        resource=Resource.TO_HOST,
        optional=True,
        returns=Kind.L,
    ),
    Kind.L: Row(
        "loaded back",
        needs=(Need((Kind.O,), At.SAME),),
        takes=(Share.OFFLOADED,),
        resource=Resource.FROM_HOST,
        optional=True,
        returns=Kind.O,
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
        in_evaluation=all(row.in_evaluation for row in rows),
    )


KINDS: Mapping[Kind, Row] = {**_SINGLE, Kind.B: _whole(Kind.I, Kind.W)}

# A whole stands for each of its parts.
WHOLES: Mapping[tuple[Kind, ...], Kind] = {row.parts: kind for kind, row in KINDS.items() if row.parts}
# What is a part of a whole.
PARTS = frozenset(part for parts in WHOLES for part in parts)
# What every stage does with every microbatch, the backward split.
SPLIT = tuple(kind for kind, row in KINDS.items() if not row.parts and not row.optional)
# What a schedule may have of any stage and microbatch, to hold less.
SAVING = tuple(kind for kind, row in KINDS.items() if row.optional and not row.of_ranks)
# The shares that it makes less.
SAVED = tuple(share for share in Share if any(share in KINDS[kind].spares + KINDS[kind].gives for kind in SAVING))
# What every rank does with every microbatch where all of them share the vocabulary.
OF_RANKS = tuple(kind for kind, row in KINDS.items() if row.of_ranks)
# What there is without a backward.
IN_EVALUATION = tuple(kind for kind, row in KINDS.items() if row.in_evaluation)
# What weight gradients are complete after, and the part of it that ends them.
ENDS_GRADIENTS: Mapping[Kind, Kind] = {
    kind: next(part for part in row.parts or (kind,) if KINDS[part].ends_gradients)
    for kind, row in KINDS.items()
    if row.ends_gradients
}
# The shares that can be seen by themselves: the first kind that takes (1) or gives back (-1) nothing else.
SEEN_BY: Mapping[Share, tuple[Kind, int]] = {
    share: (kind, sign)
    for kind, row in reversed([*KINDS.items()])
    for sign, shares in ((1, row.takes), (-1, row.gives))
    for share in shares
    if len(row.takes + row.gives) == 1
}
# The kinds that count as one where others wait: a whole as the first of its parts.
COUNTS_AS: Mapping[Kind, Kind] = {kind: row.parts[0] if row.parts else kind for kind, row in KINDS.items()}

# What only takes memory, for a pass to come.
_LATE = tuple(kind for kind in SAVING if KINDS[kind].takes)

StageKind = tuple[int, Kind]
"""(stage, kind): a pass, whatever its microbatch."""

Doing = Mapping[Kind, Collection[int]]
"""What is done with a microbatch: kinds, and the stages of each."""


def using(resource: Resource) -> frozenset[Kind]:
    """The kinds that keep ``resource`` busy."""
    return frozenset(kind for kind, row in KINDS.items() if row.resource is resource)


# The shares that go to the host.
TO_HOST = frozenset(share for kind in using(Resource.TO_HOST) for share in KINDS[kind].gives)


def stages_doing(kind: Kind, placement: Placement) -> list[int]:
    """The stages that passes of ``kind`` are written with: all, or the last one of every rank."""
    if KINDS[kind].of_ranks:
        return sorted(placement.stages_of(rank)[-1] for rank in range(placement.ranks))
    return list(range(placement.stages))


def everywhere(placement: Placement, kinds: Collection[Kind] = KINDS) -> Doing:
    """``kinds``, each on all the stages that it is written with."""
    return {kind: stages_doing(kind, placement) for kind in KINDS if kind in kinds}


def sources(
    kind: Kind, stage: int, placement: Placement, present: Collection[Kind] = KINDS
) -> list[tuple[int, tuple[Kind, ...]]]:
    """What a pass of ``kind`` on ``stage`` waits for: stages, and the kinds of which one must have ended there.

    Needs of optional kinds that are not ``present`` in the schedule are left out.
    """
    return [source for _, source in _needed(kind, stage, placement, present)]


def _needed(
    kind: Kind, stage: int, placement: Placement, present: Collection[Kind]
) -> list[tuple[At, tuple[int, tuple[Kind, ...]]]]:
    """:func:`sources`, and where each stands."""
    found: list[tuple[At, tuple[int, tuple[Kind, ...]]]] = []
    last = placement.last_stage
    for kinds, at in KINDS[kind].needs:
        if all(KINDS[each].optional and each not in present for each in kinds):
            continue
        where = {
            At.SAME: [stage],
            At.PREVIOUS: [stage - 1] if stage else [],
            At.NEXT: [stage + 1] if stage < last else [],
            At.LAST: [last],
            At.EVERY_RANK: stages_doing(kinds[0], placement) if stage == last else [],
        }[at]
        found += [(at, (each, kinds)) for each in where]
    return found


def followers(placement: Placement, doing: Doing) -> dict[StageKind, list[StageKind]]:
    """For each pass of a microbatch that has the passes ``doing`` alone, those that may start once it has ended.

    What waits for another stage's passes as well as for those that its own always has ended the latter long before, and
    follows the former.
    """
    found: dict[StageKind, list[StageKind]] = defaultdict(list)
    for kind, stages in doing.items():
        for stage in stages:
            there = [
                (at, source, each)
                for at, (source, kinds) in _needed(kind, stage, placement, doing)
                for each in kinds
                if source in doing.get(each, ())
            ]
            late = [pick for pick in there if pick[0] is not At.SAME or KINDS[pick[2]].optional]
            for _, source, each in late or there:
                found[source, each].append((stage, kind))
    return found


def in_dependency_order(placement: Placement, doing: Doing) -> Iterator[StageKind]:
    """The passes of one microbatch that has the passes ``doing``, so that little is held.

    Each comes right after what it waits for, fillers first; what only takes memory comes when nothing else can.
    """
    after = followers(placement, doing)
    waits = Counter(work for works in after.values() for work in works)
    ready = [(stage, kind) for kind, stages in doing.items() for stage in stages if not waits[stage, kind]]
    late: list[StageKind] = []
    while ready or late:
        work = (ready or late).pop()
        yield work
        waits.subtract(after[work])
        freed = sorted((each for each in after[work] if not waits[each]), key=lambda each: KINDS[each[1]].filler)
        for each in freed:
            (late if each[1] in _LATE else ready).append(each)
