"""Costs of each stage of one placement: times and memory of its passes, and latencies between ranks.

Costs refer to one standard microbatch: a single causal sequence of the training sequence length. The time of attention
grows with the square of a sequence's length. All other times and memory grow with the number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from megatron.schedules.schedule.kinds import KINDS, SAVED, SAVING, WHOLES, Doing, Kind, Pass, Share, stages_doing
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.utils.errors import PlanError


@dataclass(frozen=True)
class MicrobatchLoads:
    """Load of each microbatch, relative to the standard one.

    Args:
        tokens: number of tokens.
        squares: sum of the squared lengths of its sequences.
    """

    tokens: tuple[float, ...]
    squares: tuple[float, ...]

    @staticmethod
    def of(lengths: Sequence[Sequence[int]], standard: int, rows: int = 1) -> MicrobatchLoads:
        """Returns the loads of microbatches from the lengths of their sequences.

        Args:
            lengths: lengths of each microbatch's sequences in tokens, with padding that is computed on.
            standard: tokens of one sequence of the standard microbatch.
            rows: number of sequences of the standard microbatch.

        Raises:
            PlanError: if a microbatch has no tokens.
        """
        if any(sum(sequences) <= 0 or min(sequences) < 0 for sequences in lengths):
            raise PlanError("every microbatch needs sequences of one token or more", "plan_lengths")
        tokens = tuple(sum(sequences) / (rows * standard) for sequences in lengths)
        return MicrobatchLoads(
            tokens, tuple(sum(length * length for length in sequences) / (rows * standard**2) for sequences in lengths)
        )

    def in_order(self, order: Sequence[int]) -> MicrobatchLoads:
        """Returns the loads with microbatch ``order[k]`` in position k."""
        return MicrobatchLoads(tuple(self.tokens[m] for m in order), tuple(self.squares[m] for m in order))

    @property
    def alike(self) -> bool:
        """True if all microbatches have the same load."""
        return len({*zip(self.tokens, self.squares, strict=True)}) <= 1

    def time(self, standard: float, attention: float, microbatch: int) -> float:
        """Returns the time of a pass on ``microbatch``.

        Args:
            standard: time of the pass on the standard microbatch.
            attention: attention's part of that time.
        """
        return (standard - attention) * self.tokens[microbatch] + attention * self.squares[microbatch]

    def held(self, standard: float, microbatch: int) -> float:
        """Returns the memory for ``microbatch`` if the standard microbatch needs ``standard``."""
        return standard * self.tokens[microbatch]


# Microbatches by which a peak may only seem to exceed a limit: it is a sum in another order, and searches allow 1e-9.
_ROUNDING = 1e-8


@dataclass(frozen=True)
class StageCosts:
    """Costs of each stage of one placement.

    The unit of memory is one microbatch's activations of an average rank's layers. The unit of times is any.

    Args:
        times: time of a pass on each stage, by kind, without combined kinds. Vocabulary parallelism adds S and T.
        activation: activation memory of one microbatch on each stage, from the start of F to the end of W. It is
            1 / chunks if layers are split evenly, and the embedding and the output layer keep nothing.
        comm: P2P latency between two ranks; 0 within a rank.
        held: size of each share of a stage's activations, by stage. F keeps less than ``activation`` if I recomputes
            the rest. The vocabulary's share is on the last stage of each rank.
        standing: memory of each stage's parameters, which is always allocated; empty if it is not counted.
        one_way: whether a rank copies in one direction at a time.
        latencies: P2P latency of each pair of ranks (from, to) for which it is not ``comm``.
        attention: attention's part of ``times``.
        messages: part of the ``times`` of F, I and R in which the rank waits for messages of its experts, unless weight
            gradients run meanwhile (:mod:`.hidden_messages`); empty without such messages.
        loads: relative load of each microbatch; None if all are equal.
        passing: temporary memory of Megatron's own recompute during a B and during an I of each stage; empty without.
        splitting: price of a split backward on each stage, by which its I and W together exceed its B; empty without.
        of_device: true if the memory limit is what an average rank's parameters leave of its device. Otherwise it is
            one of activations, and counts parameters only to spread them.
    """

    times: Mapping[Kind, tuple[float, ...]]
    activation: tuple[float, ...]
    comm: float
    held: Mapping[Share, tuple[float, ...]]
    standing: tuple[float, ...] = ()
    one_way: bool = False
    latencies: Mapping[tuple[int, int], float] = field(default_factory=dict)
    attention: Mapping[Kind, tuple[float, ...]] = field(default_factory=dict)
    messages: Mapping[Kind, tuple[float, ...]] = field(default_factory=dict)
    loads: MicrobatchLoads | None = None
    passing: Mapping[Kind, tuple[float, ...]] = field(default_factory=dict)
    of_device: bool = False
    splitting: tuple[float, ...] = ()

    def latency(self, source: int, to: int) -> float:
        """Returns the latency of a message from rank ``source`` to rank ``to``; 0 within a rank."""
        return 0.0 if source == to else self.latencies.get((source, to), self.comm)

    def links_as(self, other: StageCosts) -> bool:
        """Returns whether passes wait for each other as under ``other``: only times and memory differ."""
        parts = "comm", "latencies", "one_way", "loads", "has_messages"
        return all(getattr(self, part) == getattr(other, part) for part in parts)

    def doing(self, placement: Placement) -> Doing:
        """Passes of every microbatch with a split backward. R, O and L are on the stages where they free memory."""
        return {
            kind: [stage for stage in stages_doing(kind, placement) if kind not in SAVING or self._saves(kind, stage)]
            for kind in KINDS
            if kind in self.times
        }

    @property
    def saved(self) -> bool:
        """True if any stage's activations can be recomputed or offloaded."""
        return any(kind in self.times for kind in SAVING)

    def _saves(self, kind: Kind, stage: int) -> bool:
        return any(self.held[share][stage] for share in KINDS[kind].takes + KINDS[kind].gives)

    @cached_property
    def durations(self) -> Mapping[Kind, tuple[float, ...]]:
        """Duration of each kind on each stage: of B that of its parts together, without the price of splitting it.

        It is 0 for kinds that are not used.
        """
        found = dict(self._with_wholes(self.times))
        if self.splitting:
            found[Kind.B] = tuple(time - price for time, price in zip(found[Kind.B], self.splitting, strict=True))
        return found

    @cached_property
    def of_attention(self) -> Mapping[Kind, tuple[float, ...]]:
        """Attention's part of :attr:`durations`."""
        return self._with_wholes(self.attention)

    @cached_property
    def of_messages(self) -> Mapping[Kind, tuple[float, ...]]:
        """Part of :attr:`durations` in which the rank waits for messages of its experts."""
        return self._with_wholes(self.messages)

    def _with_wholes(self, times: Mapping[Kind, tuple[float, ...]]) -> Mapping[Kind, tuple[float, ...]]:
        none = (0.0,) * len(self.activation)
        by_kind = {kind: times.get(kind, none) for kind in KINDS}
        for parts, whole in WHOLES.items():
            by_kind[whole] = tuple(map(sum, zip(*(by_kind[part] for part in parts), strict=True)))
        return by_kind

    @cached_property
    def without_splitting(self) -> StageCosts:
        """The costs of a schedule whose backwards are all whole: W takes less by the price of splitting."""
        if not self.splitting:
            return self
        weights = tuple(max(0.0, time - price) for time, price in zip(self.times[Kind.W], self.splitting, strict=True))
        return replace(self, times={**self.times, Kind.W: weights}, splitting=())

    def durations_of(self, passes: Iterable[Pass]) -> list[float]:
        """Returns the duration of each of ``passes``."""
        durations, loads = self.durations, self.loads
        if loads is None:
            return [durations[kind][stage] for stage, kind, _ in passes]
        attention = self.of_attention
        return [loads.time(durations[kind][stage], attention[kind][stage], m) for stage, kind, m in passes]

    @cached_property
    def has_messages(self) -> bool:
        """True if any pass waits for messages of experts."""
        return any(map(any, self.messages.values()))

    def messages_of(self, passes: Iterable[Pass]) -> list[float]:
        """Returns the time of each of ``passes`` in which the rank waits for messages of its experts."""
        messages, loads = self.of_messages, self.loads
        times = ((messages[kind][stage], m) for stage, kind, m in passes)
        return [time if loads is None else loads.time(time, 0.0, m) for time, m in times]

    @cached_property
    def changes(self) -> Mapping[Kind, tuple[float, ...]]:
        """Memory that a pass of each kind and stage allocates at its start or, if negative, frees at its end."""
        return {
            kind: tuple(more - less for more, less in zip(self._sum(row.takes), self._sum(row.gives), strict=True))
            for kind, row in KINDS.items()
        }

    def _sum(self, shares: Sequence[Share]) -> tuple[float, ...]:
        """Sum of ``shares`` on each stage."""
        return tuple(map(sum, zip((0.0,) * len(self.activation), *(self.held[share] for share in shares), strict=True)))

    def changes_of(self, row: Sequence[Pass]) -> list[float]:
        """Memory that each pass of a rank allocates or, if negative, frees. F allocates less if an R follows."""
        changes = self.changes
        row_changes = [changes[kind][stage] for stage, kind, _ in row]
        for saving in SAVING:
            spared = self._sum(KINDS[saving].spares)
            stages = {(stage, m) for stage, kind, m in row if kind is saving} if any(spared) else ()
            if stages:
                for index, (stage, kind, m) in enumerate(row):
                    if kind is Kind.F and (stage, m) in stages:
                        row_changes[index] -= spared[stage]
        if self.loads is not None:
            row_changes = [self.loads.held(change, m) for change, (_, _, m) in zip(row_changes, row, strict=True)]
        return row_changes

    def least(self, placement: Placement) -> float:
        """Smallest memory limit with which a schedule runs: that of one microbatch, on the rank that needs most."""
        return self.within(placement, self.least_by_rank(placement))

    def limits(self, placement: Placement, limit: float) -> list[float]:
        """Returns the memory limit of each rank if that of an average rank is ``limit``.

        A rank whose parameters need more than average has a limit that is lower by the difference. It is never below
        the memory of one microbatch, unless it is that of a device.
        """
        beyond = self._beyond(placement)
        if not any(beyond):
            return [limit] * placement.ranks
        both = zip(beyond, self.least_by_rank(placement), strict=True)
        return [
            limit - more if self.of_device or not more else min(limit, max(limit - more, least)) for more, least in both
        ]

    def within(self, placement: Placement, peaks: Sequence[float]) -> float:
        """Returns the smallest memory limit of an average rank that allows ``peaks``."""
        of_ranks = zip(peaks, self._beyond(placement), self.least_by_rank(placement), strict=True)
        return max(peak + more * (self.of_device or peak > least + _ROUNDING) for peak, more, least in of_ranks)

    def _beyond(self, placement: Placement) -> list[float]:
        """Memory of each rank's parameters above the average; at least 0."""
        if not self.standing:
            return [0.0] * placement.ranks
        own = [sum(self.standing[stage] for stage in placement.stages_of(rank)) for rank in range(placement.ranks)]
        return [max(0.0, size - sum(own) / placement.ranks) for size in own]

    def least_by_rank(self, placement: Placement) -> list[float]:
        """Returns the smallest memory in which one microbatch runs, for each rank."""
        if placement not in self._least:
            self._least[placement] = self._least_by_rank(placement)
        return self._least[placement]

    @cached_property
    def _least(self) -> dict[Placement, list[float]]:
        """Cached results."""
        return {}

    def _least_by_rank(self, placement: Placement) -> list[float]:
        doing = self.doing(placement)
        spared = [share for kind in SAVING for share in KINDS[kind].spares + KINDS[kind].gives if kind in doing]
        kept, left = self.held[Share.FORWARD], self.held[Share.WEIGHTS]
        passing = self._sum(SAVED)
        stays = self._sum([share for share in SAVED if share not in spared])
        least = []
        for rank in range(placement.ranks):
            # The output layer's share lasts at least from the last stage's F until its I.
            shared = max(self.held[Share.VOCABULARY][stage] for stage in placement.stages_of(rank))
            held = most = 0.0
            for stage in placement.stages_of(rank):
                # The peak is at this stage's F or, if its I allocates more than it frees, between I and W.
                most = max(most, held + max(kept[stage] + passing[stage], left[stage]) + shared)
                held += kept[stage] + stays[stage]
            least.append(most if self.loads is None else most * max(self.loads.tokens))
        return least
