"""Result of a verification: a job's first iteration as planned, beside the same one with whole backwards."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from statistics import median
from typing import NamedTuple

from megatron.schedules.utils.printable import amount, counted

# A difference is accepted up to this many times what the reference differs from itself.
_BEYOND_NOISE = 4.0
# A job whose gradients usually differ more than this from run to run cannot be verified.
_TOO_NOISY = 0.05
# Most differences and hooks that are named. A difference below the second number may come from another order of a sum.
_NAMED, _ROUNDING = 4, 1e-4


class Difference(NamedTuple):
    """A value that is not equal to the bit in both runs.

    Args:
        name: parameter and its stage, or what else it is.
        size: norm of the difference, divided by that of the reference; infinite for NaN, or where one run has none.
        noise: the same for two runs of the reference.
    """

    name: str
    size: float
    noise: float = 0.0


class RankResult(NamedTuple):
    """Comparison on one rank.

    Args:
        rank: global rank.
        parameters: number of parameters with a gradient.
        infinite: how many of them have one that is not finite in both runs.
        results: number of values that the loss function returned.
        gradients: gradients that differ.
        loss: what the loss function returned, if it differs.
        fired: parameters whose hooks fired more often than in the reference: name, times, times in the reference.
        peak: peak activation memory of the planned schedule, bytes; 0 if not known.
        seconds: duration of the planned schedule and of the reference.
        in_parts: parameters that not only their linears use. Their gradients come in two parts, one in I and one in W,
            so that hooks fire twice and sums have another order.
    """

    rank: int
    parameters: int
    infinite: int
    results: int
    gradients: Sequence[Difference]
    loss: Difference | None
    fired: Sequence[tuple[str, int, int]]
    peak: int
    seconds: tuple[float, float]
    in_parts: Collection[str] = ()

    @property
    def usual_noise(self) -> float:
        """Median noise of the gradients that differ; 0 if none does."""
        return median(gradient.noise for gradient in self.gradients) if self.gradients else 0.0

    @property
    def faults(self) -> list[Difference]:
        """Gradients and loss that differ by more than the job's own kernels differ from run to run."""
        # A single small parameter may repeat itself by chance.
        least = self.usual_noise
        faults = [
            gradient
            for gradient in self.gradients
            if not gradient.size <= _BEYOND_NOISE * max(gradient.noise, least)
            and not (gradient.name in self.in_parts and gradient.size <= _ROUNDING)
        ]
        loss = [] if self.loss is None else [self.loss]
        return faults + [value for value in loss if not value.size <= _BEYOND_NOISE * value.noise]

    @property
    def fired_more(self) -> list[tuple[str, int, int]]:
        """Entries of ``fired`` that a gradient in two parts does not explain."""
        return [hook for hook in self.fired if hook[0] not in self.in_parts or hook[1] > 2 * hook[2]]


def passed(ranks: Sequence[RankResult]) -> bool:
    """Returns whether the gradients, the loss and the hooks are right on all ranks."""
    noisy = any(rank.usual_noise > _TOO_NOISY for rank in ranks)
    wrong = noisy or any(rank.faults or rank.fired_more for rank in ranks)
    return not wrong and any(rank.parameters for rank in ranks)


def lines(ranks: Sequence[RankResult], name: str, planned: float | None, *, splits: bool) -> Iterator[str]:
    """Yields the table's lines.

    Args:
        ranks: results of all ranks of the job.
        name: name of the schedule.
        planned: planned peak activation memory of the worst rank, bytes; None if unknown.
        splits: whether the schedule splits backwards.
    """
    if splits:
        yield f"first iteration as {name}, and again with each I and W as one whole backward (B)"
    else:
        yield f"{name} splits no backward: first iteration run twice as it is, which shows whether it repeats itself"
    compared = f"{counted(sum(rank.parameters for rank in ranks), 'parameter')} on {counted(len(ranks), 'rank')}"
    yield from _compared("gradients", compared, [(rank.rank, value) for rank in ranks for value in rank.gradients])
    if infinite := sum(rank.infinite for rank in ranks):
        yield f"{'':14}{infinite} of them are not finite in both runs, which proves nothing of them"
    losses = [(rank.rank, rank.loss) for rank in ranks if rank.loss is not None]
    yield from _compared("loss", counted(max(rank.results for rank in ranks), "value"), losses)
    yield from _in_parts(ranks)
    yield from _hooks(ranks)
    yield f"{'peak memory':14}{_memory(ranks, planned)}"
    ours, reference = (max(rank.seconds[at] for rank in ranks) for at in (0, 1))
    yield f"{'seconds':14}{ours:.2f} (with all that a first iteration prepares), again {reference:.2f}"
    yield f"{'result':14}{_verdict(ranks)}"


def _compared(what: str, compared: str, differences: Sequence[tuple[int, Difference]]) -> Iterator[str]:
    if not differences:
        yield f"{what:14}{compared}: all equal to the bit"
        return
    yield f"{what:14}{compared}: {len(differences)} not equal to the bit"
    for rank, value in sorted(differences, key=lambda pair: -pair[1].size)[:_NAMED]:
        noise = f", the reference from itself by {value.noise:.1e}" if value.noise else ""
        yield f"{'':14}{value.name} on rank {rank} differs by {value.size:.1e} of its norm{noise}"


def _in_parts(ranks: Sequence[RankResult]) -> Iterator[str]:
    names = [f"{name} on rank {rank.rank}" for rank in ranks for name in sorted(rank.in_parts)]
    if names:
        more = ", ..." if len(names) > _NAMED else ""
        yield (
            f"{'in two parts':14}{counted(len(names), 'gradient')}, because not only their linears use the weights: "
            f"sums have another order, and hooks fire twice ({', '.join(names[:_NAMED])}{more})"
        )


def _hooks(ranks: Sequence[RankResult]) -> Iterator[str]:
    fired = [(result.rank, *hook) for result in ranks for hook in result.fired_more]
    for rank, name, times, expected in fired[:_NAMED]:
        yield f"{'hooks':14}{name} on rank {rank}: hooks fired {counted(times, 'time')} instead of {expected}"


def _memory(ranks: Sequence[RankResult], planned: float | None) -> str:
    worst = max(ranks, key=lambda rank: rank.peak)
    plan = "not planned in bytes" if planned is None else f"planned {amount(planned)} on the worst rank"
    return (
        f"{amount(worst.peak)} of activations on rank {worst.rank}, {plan}" if worst.peak else f"not measured; {plan}"
    )


def _verdict(ranks: Sequence[RankResult]) -> str:
    if passed(ranks):
        parts = {name for rank in ranks for name in rank.in_parts}
        different = {value.name for rank in ranks for value in rank.gradients} | {"loss" for rank in ranks if rank.loss}
        why = _EQUAL if not different else _ORDER if different <= parts else _NOISY
        return f"right: {why} (exit status 0)"
    faults = [fault for rank in ranks for fault in rank.faults]
    if any(rank.loss in faults for rank in ranks if rank.loss is not None):
        why = _OTHER_LOSS
    elif faults and max(fault.size for fault in faults) < _ROUNDING:
        why = "the last digits differ: gradients are summed in another order"
    elif faults or any(rank.fired_more for rank in ranks):
        why = "report it with these lines (CONTRIBUTING.md)"
    elif any(rank.usual_noise > _TOO_NOISY for rank in ranks):
        why = "the reference does not repeat itself, so nothing can be compared: give --deterministic-mode"
    else:
        why = "no parameter has a gradient"
    return f"WRONG: {why} (exit status 1)"


_EQUAL = "the schedule changes no gradient"
_ORDER = "the schedule changes gradients by the order of a sum only"
_NOISY = (
    f"nothing differs by more than {_BEYOND_NOISE:g} times what the reference differs from itself, because some "
    "kernels are not deterministic (--deterministic-mode compares to the bit)"
)
_OTHER_LOSS = (
    "the loss differs too: is there a state that a forward reads and changes and that cannot be restored, or a sample "
    "that comes from elsewhere than the data iterator?"
)
