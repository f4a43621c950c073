"""Costs: how long each pass takes, and what it holds, per stage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron.schedules.planning.errors import PlanError
from megatron.schedules.planning.kinds import KINDS, Kind, Share
from megatron.schedules.planning.placement import Placement

# Times and weights that are planned for: sums of their products stay far from what a float can hold.
_LEAST, _MOST = 1e-100, 1e100
# No linear's W needs so much more than its I: a slip.
_MOST_SHARE = 100
# Times further apart than this are lost in each other's rounding.
_APART = 1e15


def _fault(values: Iterable[float], what: str, *, zero: bool) -> str:
    """What ``values`` must be (``what``, or within bounds) where one of them is not planned for; else empty."""
    wrong = [value for value in values if not (_LEAST <= value <= _MOST or (zero and value == 0))]
    if any(0 < value < math.inf for value in wrong):
        return f"from {_LEAST:g} to {_MOST:g}"
    return what if wrong else ""


@dataclass(frozen=True)
class StageCosts:
    """What each stage of one placement costs.

    Args:
        times: by kind, for those that are not made of others, the time of each stage's pass, any unit.
        activation: what one microbatch on each stage holds from the start of F to the end of W, in
            microbatches' worth of a whole rank's activations (1 / chunks where layers are spread evenly).
        comm: P2P latency, the time of a message from one rank to another; within a rank it takes none.
        shares: the parts of ``activation``: what F keeps until I, less than all where I recomputes the rest, and what I
            leaves to W.
    """

    times: Mapping[Kind, tuple[float, ...]]
    activation: tuple[float, ...]
    comm: float
    shares: Mapping[Share, float]

    @cached_property
    def durations(self) -> Mapping[Kind, tuple[float, ...]]:
        """Kind -> duration by stage; a whole takes as long as its parts."""
        parts = {kind: row.parts or (kind,) for kind, row in KINDS.items()}
        times = {kind: zip(*(self.times[part] for part in found), strict=True) for kind, found in parts.items()}
        return {kind: tuple(map(sum, found)) for kind, found in times.items()}

    @cached_property
    def changes(self) -> Mapping[Kind, tuple[float, ...]]:
        """Kind -> by stage, the memory a pass takes (from its start) or, negative, gives back (at its end)."""
        found = {}
        for kind, row in KINDS.items():
            share = sum(self.shares[taken] for taken in row.takes) - sum(self.shares[given] for given in row.gives)
            found[kind] = tuple(share * held for held in self.activation)
        return found

    def least(self, placement: Placement) -> float:
        """The least memory in which anything runs: one microbatch, on the rank that holds most of it."""
        kept, most = self.shares[Share.FORWARD], 0.0
        for rank in range(placement.ranks):
            held = 0.0
            for stage in placement.stages_of(rank):
                # Up to this stage's F, and, where its I takes more than it gives back, while it waits for its W.
                most = max(most, held + max(kept, self.shares[Share.WEIGHTS]) * self.activation[stage])
                held += kept * self.activation[stage]
        return most


@dataclass(frozen=True)
class Costs:
    """Times of one pass over half a rank's layers, and the P2P latency between ranks: ``--costs F,I,W,COMM``.

    ``input_grad`` is the paper's B. A stage of a c-chunk placement takes 2/c of these, so that every placement does
    the same work. ``stage_weights`` (optional) scales single stages, for an embedding or an output layer that makes
    the ends heavier; ``stage_activations`` does the same for what they hold. Both hold one number a stage, or a
    multiple of that, the model being cut into so many equal slices: a stage takes the mean of its own.
    ``weight_share`` is what I leaves to W, against what F leaves to I: as much unless measured. It may be more, since I
    makes gradients that W needs.
    ``recompute`` is the part of the forward that I does again, and ``kept`` the part of the activations that F leaves
    to it: less than all where the rest is recomputed. Memory counts whole activations, so 1F1B that recomputes nothing
    holds d microbatches.
    """

    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    comm: float = 0.0
    stage_weights: tuple[float, ...] | None = None
    stage_activations: tuple[float, ...] | None = None
    weight_share: float = 1.0
    recompute: float = 0.0
    kept: float = 1.0

    def __post_init__(self) -> None:
        times = (self.forward, self.input_grad, self.weight_grad)
        if fault := _fault(times, "positive numbers", zero=False):
            raise PlanError(f"costs F,I,W must be {fault}, not {','.join(f'{t:g}' for t in times)}", "costs")
        if fault := _fault([self.comm], "zero or a positive number", zero=True):
            raise PlanError(f"the P2P latency must be {fault}, not {self.comm:g}", "costs")
        if max(*times, self.comm) > _APART * min(times):
            raise PlanError(f"passes and P2P latency may differ {_APART:g} times at most", "costs")
        for part, scale in (("stage_weights", self.stage_weights), ("stage_activations", self.stage_activations)):
            if fault := _fault(scale or (), "zero or positive numbers", zero=True):
                raise PlanError(f"per-stage weights must be {fault}", part)
        if self.stage_weights is not None and not any(self.stage_weights):
            raise PlanError("at least one stage must take time", "stage_weights")
        if not 0 <= self.weight_share <= _MOST_SHARE:
            raise PlanError(
                f"the share of memory held until W must be from 0 to {_MOST_SHARE}, not {self.weight_share:g}",
                "weight_share",
            )
        if not 0 <= self.recompute <= 1:
            raise PlanError(
                f"the share of the forward that is recomputed must be from 0 to 1, not {self.recompute:g}", "recompute"
            )
        if not 0 <= self.kept <= 1:
            raise PlanError(f"the share of memory kept for recomputing must be from 0 to 1, not {self.kept:g}", "kept")

    @staticmethod
    def parse(text: str) -> Costs:
        """Read ``F,I,W`` or ``F,I,W,COMM``; raises :class:`PlanError` saying what is wrong."""
        try:
            numbers = [float(part) for part in text.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) not in (3, 4):
            raise PlanError(
                f"costs are F,I,W or F,I,W,COMM, three or four numbers such as 1,1.1,0.75,0.05, not {text!r}", "costs"
            )
        forward, input_grad, weight_grad, comm = (*numbers, 0.0)[:4]
        return Costs(forward, input_grad, weight_grad, comm)

    def around_one(self) -> tuple[Costs, float]:
        """The same proportions in numbers around 1, which searches' tolerance for rounding is made for; and the unit.

        The unit is a power of two, which rounds nothing: the same plan comes out whatever costs are measured in.
        """
        unit = 2.0 ** math.frexp(self.forward + self.input_grad + self.weight_grad)[1]
        times = {field: getattr(self, field) / unit for field in ("forward", "input_grad", "weight_grad", "comm")}
        return replace(self, **times), unit

    def on(self, placement: Placement) -> StageCosts:
        """These costs for every stage of ``placement``."""
        share = 2 / placement.chunks
        weights = _per_stage(self.stage_weights, placement, "stage_weights")
        held = _per_stage(self.stage_activations, placement, "stage_activations")
        times = {
            Kind.F: self.forward,
            Kind.I: self.input_grad + self.recompute * self.forward,
            Kind.W: self.weight_grad,
        }
        return StageCosts(
            times={kind: tuple(time * share * w for w in weights) for kind, time in times.items()},
            activation=tuple(h / placement.chunks for h in held),
            comm=self.comm,
            shares={Share.FORWARD: self.kept, Share.WEIGHTS: self.weight_share},
        )


def _per_stage(values: Sequence[float] | None, placement: Placement, what: str) -> Sequence[float]:
    """One value a stage: given so, or for slices finer than stages, of which a stage takes the mean."""
    stages = placement.stages
    if values is None:
        return (1.0,) * stages
    if not values or len(values) % stages:
        given = f"{len(values)} {what.replace('_', ' ')}"
        raise PlanError(f"{given} given for {placement}, which has {stages} stages", what)
    each = len(values) // stages
    return tuple(sum(values[s * each : (s + 1) * each]) / each for s in range(stages))
