"""Each iteration planned for the lengths of its microbatches, beside the iteration before it."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine
from megatron.training import print_rank_0

from megatron.schedules.integration.flags.planner import Planner
from megatron.schedules.integration.lengths.prefetch import ReadAhead, lengths_of, under
from megatron.schedules.planner.microbatch_lengths import LengthsPlan, LengthsPlanner
from megatron.schedules.runtime.checker import check
from megatron.schedules.runtime.lowering import lower
from megatron.schedules.runtime.program import Program
from megatron.schedules.schedule.microbatch_loads import MicrobatchLoads
from megatron.schedules.schedule.simulator import Timeline
from megatron.schedules.search.compiled import compiled_climb

_FIRST_RUN = (RerunState.NOT_RUNNING_YET, RerunState.INITIAL_RUN)


class Planned(NamedTuple):
    """One iteration.

    Args:
        program: of this rank, on places.
        order: place k has the data loader's microbatch ``order[k]``.
        timeline: how it was planned.
        less: how much shorter it is planned to be than the usual plan of these microbatches, as a share.
    """

    program: Program
    order: tuple[int, ...]
    timeline: Timeline
    less: float


class Sizes(NamedTuple):
    """Of an iteration: n, and what a standard microbatch is."""

    microbatches: int
    sequence: int
    rows: int


class LengthsBeside:
    """Plans iterations ahead. Making one is collective over all ranks: it makes a group for each replica of the model.

    While an iteration runs, a thread reads the samples of the next; the rank with the first stage tells all ranks of
    its replica their lengths, over gloo, and each makes the same plan. The next iteration waits for it, should it not
    be there: so all ranks run the same. Only the first has nothing to run beside. Where samples end, or there are more
    or fewer microbatches than foreseen, lengths are told again, or the usual plan is run, on all ranks alike.

    Args:
        planner: gives the usual plan.
        attention: the shares of an average layer's F and I that attention takes at the full sequence length.
        timeout: of the groups.
    """

    def __init__(self, planner: Planner, attention: tuple[float, float], timeout: timedelta) -> None:
        self._planner, self._attention = planner, attention
        self._rank = parallel_state.get_pipeline_model_parallel_rank()
        first, self._chunk = planner.placement.rank_of[0], planner.placement.chunk_of(0)
        self._tells = self._rank == first and parallel_state.get_tensor_model_parallel_rank() == 0
        self._group, self._teller = _group(self._tells, timeout)
        self._of_size = cache(planner.for_lengths)
        self._next: _Asked | None = None
        self._now: Planned | None = None
        self._said = False
        compiled_climb()

    def begin(self, iterators: Sequence[Any], sizes: Sizes) -> Planned | None:
        """What this iteration does, its samples being handed out in that order; None for the usual plan.

        An iteration that is run again does what it did.

        Args:
            iterators: one for each chunk of this rank.
            sizes: the iteration's.
        """
        if get_rerun_state_machine().state not in _FIRST_RUN:
            return self._now
        read = [under(iterator) for iterator in iterators if iterator is not None]
        asked, self._next = self._next, None
        if asked is not None:
            asked.wait()
        if asked is None or asked.sizes != sizes:
            asked = self._ask(iterators, read, sizes)
            asked.wait()
        self._now = asked.found
        if self._now is not None:
            for each in read:
                each.hand_out(self._now.order)
            self._next = self._ask(iterators, read, sizes)
        self._say_once()
        return self._now

    def _ask(self, iterators: Sequence[Any], read: Sequence[ReadAhead], sizes: Sizes) -> _Asked:
        telling = under(iterators[self._chunk]) if self._tells and iterators[self._chunk] is not None else None
        return _Asked(lambda: self._plan(read, telling, sizes), sizes)

    def _plan(self, read: Sequence[ReadAhead], telling: ReadAhead | None, sizes: Sizes) -> Planned | None:
        n = sizes.microbatches
        for each in read:
            each.read(n)
        told: list[Any] = [None]
        if self._tells:
            told = [_told(telling, n)]
        dist.broadcast_object_list(told, self._teller, self._group, torch.device("cpu"))
        (lengths,) = told
        if isinstance(lengths, str):
            raise ValueError(lengths)
        if lengths is None:
            return None
        planner: LengthsPlanner = self._of_size(n, self._attention)
        loads = MicrobatchLoads.of(lengths, sizes.sequence, sizes.rows)
        found, usual = planner.plan(loads), planner.usual(loads)
        self._agree(found)
        programs = lower(found.schedule, found.timeline.costs)
        check(programs)
        less = 1 - found.timeline.makespan / usual.timeline.makespan
        return Planned(programs[self._rank], found.order, found.timeline, less)

    def _agree(self, found: LengthsPlan) -> None:
        """All ranks of the replica have this plan.

        Raises:
            RuntimeError: where one has another.
        """
        digest = hashlib.sha256(repr((found.order, found.schedule.order)).encode()).digest()[:8]
        mine = torch.tensor([int.from_bytes(digest, "little", signed=True)])
        every = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(every, mine, self._group)
        if any(each != mine for each in every):
            raise RuntimeError(
                "--pipeline-plan-lengths: ranks of one pipeline have planned an iteration differently: their Python, "
                "numba or version of this package differ; give all the same"
            )

    def _say_once(self) -> None:
        if self._said:
            return
        self._said = True
        if self._now is None:
            said = "samples end within the first iteration: the usual plan is run"
        elif self._now.less > 0:
            said = f"the first iteration is planned to take {100 * self._now.less:.1f} % less than in the usual plan"
        else:
            said = "no better plan for the first iteration's lengths than the usual one"
        print_rank_0(f"pipeline schedule: planned for lengths: {said}")


class _Asked:
    """A plan under way in a thread."""

    def __init__(self, make: Any, sizes: Sizes) -> None:
        self.sizes = sizes
        self.found: Planned | None = None
        self._error: BaseException | None = None
        self._make = make
        self._thread = threading.Thread(target=self._run, name="plan for lengths")
        self._thread.start()

    def wait(self) -> None:
        """Until it is there; raises what went wrong."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self.found = self._make()
        except BaseException as error:  # told to the thread that waits
            self._error = error


def _told(read: ReadAhead | None, count: int) -> list[list[int]] | str | None:
    """The lengths of the next ``count`` samples, what is wrong with them, or None where they end before."""
    if read is None:
        return "--pipeline-plan-lengths: the rank with the first stage reads no samples: leave the flag out"
    samples = read.read(count)
    if len(samples) < count:
        return None
    try:
        return [lengths_of(sample) for sample in samples]
    except ValueError as error:
        return str(error)


def in_loaders_order(losses: Sequence[Any], order: Sequence[int]) -> list[Any]:
    """``losses``, one for each place, by the data loader's microbatch; as they are where there are none."""
    if len(losses) != len(order):
        return list(losses)
    return [loss for _, loss in sorted(zip(order, losses, strict=True), key=lambda pair: pair[0])]


def _group(tells: bool, timeout: timedelta) -> tuple[dist.ProcessGroup, int]:
    """This rank's replica of the model, over gloo, and its rank that tells lengths; collective over all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    mine = dist.get_process_group_ranks(parallel_state.get_model_parallel_group())
    dist.all_gather_object(found, (tuple(mine), tells))
    groups = {
        ranks: parallel_state.create_group(list(ranks), timeout=timeout, backend="gloo", group_desc="LENGTHS")
        for ranks in sorted({ranks for ranks, _ in found})
    }
    (teller,) = (rank for rank in mine if found[rank][1])
    return groups[tuple(mine)], teller
