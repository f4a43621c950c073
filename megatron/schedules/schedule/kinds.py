"""Passes, and the table of their kinds: what each kind waits for, produces, allocates and frees.

All code that orders, times, checks, draws or executes passes uses this table. It contains no times, no colours, no
torch and no search. docs/architecture.md explains how to add a kind.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum, StrEnum
from functools import lru_cache
from typing import NamedTuple

from megatron.schedules.schedule.placement import Placement
from megatron.schedules.utils.errors import PlanError


class Kind(StrEnum):
    """Kind of a pass, by its standard letter. :data:`KINDS` describes each kind."""

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
    """Stage of a required pass, relative to the stage of the pass that requires it."""

    SAME = "the same stage"
    PREVIOUS = "the stage before"
    NEXT = "the stage after"
    LAST = "the last stage"
    EVERY_RANK = "every rank's last stage, for the last stage of all"


class Need(NamedTuple):
    """Dependency: a pass of one of ``kinds`` on the same microbatch must have ended.

    It is ignored if there is no such stage, or if all of ``kinds`` are optional and the schedule has none of them.
    """

    kinds: tuple[Kind, ...]
    at: At


class Result(StrEnum):
    """Tensor that one stage sends to another: its output, or the gradient of its input."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"


class Share(StrEnum):
    """Parts of a stage's activations that are allocated and freed together. :class:`.StageCosts` has their sizes."""

    FORWARD = "from F until I"
    WEIGHTS = "from I until W"
    VOCABULARY = "from S until T"
    RECOMPUTED = "from F or, where it comes, R until I"
    OFFLOADED = "from F until O and from L until I, where these come"


class Resource(StrEnum):
    """Resource of a rank that a pass occupies. Passes on one resource run one at a time.

    Copies run in parallel with computation. A copy to the host begins as soon as the passes it needs have ended, and
    computation waits for its end at its position in the order. A copy from the host begins at its position, and the
    pass that needs it waits.
    """

    COMPUTE = "computing"
    TO_HOST = "copies to the host"
    FROM_HOST = "copies from the host"


class KindProperties(NamedTuple):
    """Properties of one kind of pass.

    Args:
        meaning: description in words, for legends.
        needs: passes that must have ended before.
        makes: tensor that it sends: an activation to the next stage, a gradient to the previous one.
        takes, gives: activations that it allocates at its start, and activations that it frees at its end.
        resource: resource that it occupies.
        filler: whether no other pass waits for it.
        ends_gradients: whether it completes the microbatch's weight gradients of the stage.
        parts: kinds that it combines; empty for a single kind.
        optional: whether a stage can leave it out, for any microbatch.
        spares: activations that the stage's forward does not keep if this pass follows.
        returns: kind that must accompany it on the same stage.
        of_ranks: whether it belongs to a rank: either all ranks run it for every microbatch, or none does. It is
            written with the last stage of the rank.
        in_evaluation: whether it also runs without a backward.
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
    Kind.F: KindProperties(
        "forward",
        needs=(Need((Kind.F,), At.PREVIOUS),),
        makes=Result.ACTIVATION,
        takes=(Share.FORWARD, Share.RECOMPUTED, Share.OFFLOADED),
        in_evaluation=True,
    ),
    Kind.I: KindProperties(
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
    Kind.W: KindProperties(
        "weight gradient",
        needs=(Need((Kind.I,), At.SAME),),
        gives=(Share.WEIGHTS,),
        filler=True,
        ends_gradients=True,
    ),
    Kind.S: KindProperties(
        "part of the output layer",
        needs=(Need((Kind.F,), At.LAST),),
        takes=(Share.VOCABULARY,),
        optional=True,
        of_ranks=True,
        in_evaluation=True,
    ),
    Kind.T: KindProperties(
        "its weight gradient",
        needs=(Need((Kind.S,), At.SAME), Need((Kind.I, Kind.B), At.LAST)),
        gives=(Share.VOCABULARY,),
        filler=True,
        ends_gradients=True,
        optional=True,
        of_ranks=True,
    ),
    Kind.R: KindProperties(
        "recompute",
        needs=(Need((Kind.F,), At.SAME),),
        takes=(Share.RECOMPUTED,),
        optional=True,
        spares=(Share.RECOMPUTED,),
    ),
    Kind.O: KindProperties(
        "offloaded to the host",
        needs=(Need((Kind.F,), At.SAME),),
        gives=(Share.OFFLOADED,),
        resource=Resource.TO_HOST,
        optional=True,
        returns=Kind.L,
    ),
    Kind.L: KindProperties(
        "loaded back",
        needs=(Need((Kind.O,), At.SAME),),
        takes=(Share.OFFLOADED,),
        resource=Resource.FROM_HOST,
        optional=True,
        returns=Kind.O,
    ),
}


def _whole(*parts: Kind) -> KindProperties:
    """Properties of a kind that combines ``parts``. Dependencies between the parts are dropped."""
    rows = [_SINGLE[part] for part in parts]
    needs = [need for row in rows for need in row.needs]
    taken = [share for row in rows for share in row.takes]
    given = [share for row in rows for share in row.gives]
    return KindProperties(
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


KINDS: Mapping[Kind, KindProperties] = {**_SINGLE, Kind.B: _whole(Kind.I, Kind.W)}

# Combined kinds by their parts.
WHOLES: Mapping[tuple[Kind, ...], Kind] = {row.parts: kind for kind, row in KINDS.items() if row.parts}
# Kinds that are a part of a combined kind.
PARTS = frozenset(part for parts in WHOLES for part in parts)
# Kinds that every stage runs for every microbatch if the backward is split.
SPLIT = tuple(kind for kind, row in KINDS.items() if not row.parts and not row.optional)
# Optional kinds that save memory, on any stage and microbatch.
SAVING = tuple(kind for kind, row in KINDS.items() if row.optional and not row.of_ranks)
# Shares that these kinds reduce.
SAVED = tuple(share for share in Share if any(share in KINDS[kind].spares + KINDS[kind].gives for kind in SAVING))
# Kinds that every rank runs for every microbatch under vocabulary parallelism.
OF_RANKS = tuple(kind for kind, row in KINDS.items() if row.of_ranks)
# Kinds that run without a backward.
IN_EVALUATION = tuple(kind for kind, row in KINDS.items() if row.in_evaluation)
# Kinds that complete weight gradients, each with the part that does so.
ENDS_GRADIENTS: Mapping[Kind, Kind] = {
    kind: next(part for part in row.parts or (kind,) if KINDS[part].ends_gradients)
    for kind, row in KINDS.items()
    if row.ends_gradients
}
# Shares that can be measured separately, each with the first kind that allocates (1) or frees (-1) nothing else.
SEEN_BY: Mapping[Share, tuple[Kind, int]] = {
    share: (kind, sign)
    for kind, row in reversed([*KINDS.items()])
    for sign, shares in ((1, row.takes), (-1, row.gives))
    for share in shares
    if len(row.takes + row.gives) == 1
}
# Kind under which each kind counts as a dependency: a combined kind counts as the first of its parts.
COUNTS_AS: Mapping[Kind, Kind] = {kind: row.parts[0] if row.parts else kind for kind, row in KINDS.items()}

# Dependencies that are kept: searches ask for those of a placement once for each plan.
_DEPENDENCIES = 2**14
# Kinds that only allocate memory, for a later pass.
_LATE = tuple(kind for kind in SAVING if KINDS[kind].takes)

StageKind = tuple[int, Kind]
"""(stage, kind) of a pass, for any microbatch."""

Doing = Mapping[Kind, Collection[int]]
"""Passes of a microbatch: kinds, and the stages of each."""


def using(resource: Resource) -> frozenset[Kind]:
    """Returns the kinds that occupy ``resource``."""
    return frozenset(kind for kind, row in KINDS.items() if row.resource is resource)


# Kinds that compute, rather than copy in the background.
COMPUTING = using(Resource.COMPUTE)
# Shares that are copied to the host.
TO_HOST = frozenset(share for kind in using(Resource.TO_HOST) for share in KINDS[kind].gives)


def stages_doing(kind: Kind, placement: Placement) -> list[int]:
    """Returns the stages that passes of ``kind`` are written with: all, or the last one of every rank."""
    if KINDS[kind].of_ranks:
        return sorted(placement.stages_of(rank)[-1] for rank in range(placement.ranks))
    return list(range(placement.stages))


def everywhere(placement: Placement, kinds: Collection[Kind] = KINDS) -> Doing:
    """Returns ``kinds``, each with all stages that it is written with."""
    return {kind: stages_doing(kind, placement) for kind in KINDS if kind in kinds}


def sources(
    kind: Kind, stage: int, placement: Placement, present: Collection[Kind] = KINDS
) -> list[tuple[int, tuple[Kind, ...]]]:
    """Dependencies of a pass of ``kind`` on ``stage``: stages, and the kinds of which one must have ended there.

    Optional kinds that are not ``present`` in the schedule are left out.
    """
    return [source for _, source in _needed(kind, stage, placement, frozenset(present))]


@lru_cache(_DEPENDENCIES)
def _needed(
    kind: Kind, stage: int, placement: Placement, present: frozenset[Kind]
) -> Sequence[tuple[At, tuple[int, tuple[Kind, ...]]]]:
    """Returns :func:`sources`, each with its relative stage."""
    needs: list[tuple[At, tuple[int, tuple[Kind, ...]]]] = []
    last = placement.last_stage
    for kinds, at in KINDS[kind].needs:
        if all(KINDS[needed].optional and needed not in present for needed in kinds):
            continue
        where = {
            At.SAME: [stage],
            At.PREVIOUS: [stage - 1] if stage else [],
            At.NEXT: [stage + 1] if stage < last else [],
            At.LAST: [last],
            At.EVERY_RANK: stages_doing(kinds[0], placement) if stage == last else [],
        }[at]
        needs += [(at, (source, kinds)) for source in where]
    return needs


def followers(placement: Placement, doing: Doing) -> dict[StageKind, list[StageKind]]:
    """For each pass of a microbatch with the passes ``doing``: the passes that can start once it has ended.

    If a pass depends on other stages as well as on its own, only the other stages (and optional passes) count: the
    required passes of its own stage end long before.
    """
    after: dict[StageKind, list[StageKind]] = defaultdict(list)
    present = frozenset(doing)
    for kind, stages in doing.items():
        for stage in stages:
            there = [
                (at, source, needed)
                for at, (source, kinds) in _needed(kind, stage, placement, present)
                for needed in kinds
                if source in doing.get(needed, ())
            ]
            late = [pick for pick in there if pick[0] is not At.SAME or KINDS[pick[2]].optional]
            for _, source, needed in late or there:
                after[source, needed].append((stage, kind))
    return after


def in_dependency_order(placement: Placement, doing: Doing) -> Iterator[StageKind]:
    """Yields the passes ``doing`` of one microbatch in an order that needs little memory.

    Each pass comes right after its dependencies, fillers first. Passes that only allocate memory come last.
    """
    after = followers(placement, doing)
    waits = Counter(work for works in after.values() for work in works)
    ready = [(stage, kind) for kind, stages in doing.items() for stage in stages if not waits[stage, kind]]
    late: list[StageKind] = []
    while ready or late:
        work = (ready or late).pop()
        yield work
        waits.subtract(after[work])
        freed = [successor for successor in after[work] if not waits[successor]]
        for successor in sorted(freed, key=lambda successor: KINDS[successor[1]].filler):
            (late if successor[1] in _LATE else ready).append(successor)


class Pass(NamedTuple):
    """One operation, written ``{stage}{kind}{microbatch}`` as in torch.distributed.pipelining: ``2F0``, ``5I3``."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Pass:
        """Reads a pass such as ``"5I3"``; raises :class:`PlanError` for anything else."""
        match = _FORM.fullmatch(text.strip())
        if match is None:
            raise PlanError(
                f"{text.strip()!r} is not a pass: write STAGE, one of {' '.join(Kind)}, MICROBATCH, as in 2F0 or 5I3"
            )
        return Pass(int(match[1]), Kind(match[2]), int(match[3]))


_FORM = re.compile(rf"(\d{{1,9}})({'|'.join(Kind)})(\d{{1,9}})", re.ASCII)
