"""What each stage of one placement costs: the times of its passes, what they hold, and messages between ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from megatron.schedules.schedule.kinds import KINDS, SAVED, SAVING, WHOLES, Doing, Kind, Share, stages_doing
from megatron.schedules.schedule.microbatch_loads import MicrobatchLoads
from megatron.schedules.schedule.passes import Pass
from megatron.schedules.schedule.placement import Placement


@dataclass(frozen=True)
class StageCosts:
    """What each stage of one placement costs.

    Args:
        times: by kind, for those that are not made of others, the time of each stage's pass, any unit. Where all ranks
            share the vocabulary there are times of S and T, too.
        activation: what one microbatch on each stage holds from the start of F to the end of W, in
            microbatches' worth of the activations of an average rank's layers (1 / chunks on each stage where layers
            are split evenly, and embedding and output layer hold nothing of their own).
        comm: P2P latency, the time of a message from one rank to another; within a rank it takes none.
        held: by stage, in the same unit, what F keeps until I, less than ``activation`` where I recomputes the rest,
            what I leaves to W, and, on the last stage of each rank, what S leaves to T; what R recomputes and what O
            and L offload, where these come.
        standing: by stage, in the same unit, what its parameters hold all the time; empty where that is not counted.
        one_way: whether a rank copies to the host and from it by turns, not both at once.
        latencies: of single pairs of ranks, from and to, the P2P latency where it is not ``comm``.
        attention: of ``times``, what attention takes.
        loads: how much of all this each microbatch has; None where they are alike.
    """

    times: Mapping[Kind, tuple[float, ...]]
    activation: tuple[float, ...]
    comm: float
    held: Mapping[Share, tuple[float, ...]]
    standing: tuple[float, ...] = ()
    one_way: bool = False
    latencies: Mapping[tuple[int, int], float] = field(default_factory=dict)
    attention: Mapping[Kind, tuple[float, ...]] = field(default_factory=dict)
    loads: MicrobatchLoads | None = None

    def latency(self, source: int, to: int) -> float:
        """The time of a message from rank ``source`` to rank ``to``; none within a rank."""
        return 0.0 if source == to else self.latencies.get((source, to), self.comm)

    def doing(self, placement: Placement) -> Doing:
        """What is done with every microbatch, the backward split, and where: R, O and L where they free memory."""
        return {
            kind: [stage for stage in stages_doing(kind, placement) if kind not in SAVING or self._saves(kind, stage)]
            for kind in KINDS
            if kind in self.times
        }

    @property
    def saved(self) -> bool:
        """Whether any stage's activations may be recomputed or offloaded."""
        return any(kind in self.times for kind in SAVING)

    def _saves(self, kind: Kind, stage: int) -> bool:
        return any(self.held[share][stage] for share in KINDS[kind].takes + KINDS[kind].gives)

    @cached_property
    def durations(self) -> Mapping[Kind, tuple[float, ...]]:
        """Kind -> duration by stage; a whole takes as long as its parts, and what is not done none."""
        return self._with_wholes(self.times)

    @cached_property
    def of_attention(self) -> Mapping[Kind, tuple[float, ...]]:
        """What of :attr:`durations` attention takes."""
        return self._with_wholes(self.attention)

    def _with_wholes(self, times: Mapping[Kind, tuple[float, ...]]) -> Mapping[Kind, tuple[float, ...]]:
        none = (0.0,) * len(self.activation)
        found = {kind: times.get(kind, none) for kind in KINDS}
        for parts, whole in WHOLES.items():
            found[whole] = tuple(map(sum, zip(*(found[part] for part in parts), strict=True)))
        return found

    def durations_of(self, passes: Iterable[Pass]) -> list[float]:
        """How long each of ``passes`` takes."""
        durations, loads = self.durations, self.loads
        if loads is None:
            return [durations[kind][stage] for stage, kind, _ in passes]
        attention = self.of_attention
        return [loads.time(durations[kind][stage], attention[kind][stage], m) for stage, kind, m in passes]

    @cached_property
    def changes(self) -> Mapping[Kind, tuple[float, ...]]:
        """Kind -> by stage, the memory a pass takes (from its start) or, negative, gives back (at its end)."""
        return {
            kind: tuple(more - less for more, less in zip(self._sum(row.takes), self._sum(row.gives), strict=True))
            for kind, row in KINDS.items()
        }

    def _sum(self, shares: Sequence[Share]) -> tuple[float, ...]:
        """By stage, all of ``shares``."""
        return tuple(map(sum, zip((0.0,) * len(self.activation), *(self.held[share] for share in shares), strict=True)))

    def changes_of(self, row: Sequence[Pass]) -> list[float]:
        """The memory that each pass of a rank's order takes or, negative, gives back; a forward less where R comes."""
        changes = self.changes
        found = [changes[kind][stage] for stage, kind, _ in row]
        for saving in SAVING:
            spared = self._sum(KINDS[saving].spares)
            stages = {(stage, m) for stage, kind, m in row if kind is saving} if any(spared) else ()
            if stages:
                for index, (stage, kind, m) in enumerate(row):
                    if kind is Kind.F and (stage, m) in stages:
                        found[index] -= spared[stage]
        if self.loads is not None:
            found = [self.loads.held(change, m) for change, (_, _, m) in zip(found, row, strict=True)]
        return found

    def least(self, placement: Placement) -> float:
        """The least memory in which anything runs: one microbatch, on the rank that holds most of it."""
        return max(self.least_by_rank(placement))

    def limits(self, placement: Placement, limit: float) -> list[float]:
        """What each rank may hold where an average one may hold ``limit``.

        Less by what its parameters hold beyond those of an average rank, though never less than one microbatch takes.
        """
        beyond = self._beyond(placement)
        if not any(beyond):
            return [limit] * placement.ranks
        both = zip(beyond, self.least_by_rank(placement), strict=True)
        return [min(limit, max(limit - more, least)) if more else limit for more, least in both]

    def within(self, placement: Placement, peaks: Sequence[float]) -> float:
        """The least that an average rank must be let hold for ranks to hold ``peaks``."""
        of_ranks = zip(peaks, self._beyond(placement), self.least_by_rank(placement), strict=True)
        return max(peak + more * (peak > least) for peak, more, least in of_ranks)

    def _beyond(self, placement: Placement) -> list[float]:
        """How much more each rank's parameters hold than those of an average one."""
        if not self.standing:
            return [0.0] * placement.ranks
        own = [sum(self.standing[stage] for stage in placement.stages_of(rank)) for rank in range(placement.ranks)]
        return [max(0.0, each - sum(own) / placement.ranks) for each in own]

    def least_by_rank(self, placement: Placement) -> list[float]:
        """For each rank, the least memory in which one microbatch runs."""
        if placement not in self._least:
            self._least[placement] = self._least_by_rank(placement)
        return self._least[placement]

    @cached_property
    def _least(self) -> dict[Placement, list[float]]:
        """What was asked for before."""
        return {}

    def _least_by_rank(self, placement: Placement) -> list[float]:
        doing = self.doing(placement)
        spared = [share for kind in SAVING for share in KINDS[kind].spares + KINDS[kind].gives if kind in doing]
        kept, left = self.held[Share.FORWARD], self.held[Share.WEIGHTS]
        passing = self._sum(SAVED)
        stays = self._sum([share for share in SAVED if share not in spared])
        found = []
        for rank in range(placement.ranks):
            # That of the output layer is there from the last stage's F until its I, and perhaps longer.
            shared = max(self.held[Share.VOCABULARY][stage] for stage in placement.stages_of(rank))
            held = most = 0.0
            for stage in placement.stages_of(rank):
                # Up to this stage's F, and, where its I takes more than it gives back, while it waits for its W.
                most = max(most, held + max(kept[stage] + passing[stage], left[stage]) + shared)
                held += kept[stage] + stays[stage]
            found.append(most if self.loads is None else most * max(self.loads.tokens))
        return found
