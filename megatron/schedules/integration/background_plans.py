"""Plans each iteration for the lengths of its microbatches, in the background of the previous iteration.

Its samples are read one iteration ahead, and handed out in the planned order.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import RerunDataIterator, RerunState, get_rerun_state_machine
from torch import Tensor

from megatron.schedules.integration.log.rank_lines import print_rank_0
from megatron.schedules.planner.microbatch_lengths import LengthsPlan, LengthsPlanner
from megatron.schedules.programs.checker import proved
from megatron.schedules.programs.program import Program
from megatron.schedules.runtime.control_messages import of_all_ranks
from megatron.schedules.runtime.planner import Planner
from megatron.schedules.schedule.simulator import Timeline
from megatron.schedules.schedule.stage_costs import MicrobatchLoads
from megatron.schedules.search.compiled import compiled_climb

_FIRST_RUN = (RerunState.NOT_RUNNING_YET, RerunState.INITIAL_RUN)


class IterationPlan(NamedTuple):
    """Plan of one iteration.

    Args:
        program: program of this rank, by position.
        order: position k has the data loader's microbatch ``order[k]``.
        timeline: planned timeline.
        less: planned reduction of the iteration time compared with the usual plan, as a fraction.
    """

    program: Program
    order: tuple[int, ...]
    timeline: Timeline
    less: float


class IterationSizes(NamedTuple):
    """Sizes of an iteration: n, and the size of a standard microbatch."""

    microbatches: int
    sequence: int
    rows: int


class BackgroundPlans:
    """Plans iterations ahead. Creation is collective over all ranks: it makes a group for each replica of the model.

    During an iteration, a background thread reads the samples of the next one. The rank with the first stage sends
    their lengths over gloo to all ranks of its replica, and each makes the same plan. The next iteration waits for this
    plan, so all ranks run the same one. The first iteration cannot be planned in the background. If the samples end, or
    the number of microbatches differs from the expected one, all ranks send lengths again or run the usual plan.

    Args:
        planner: gives the usual plan.
        attention: attention's shares of an average layer's F and I at the full sequence length.
        timeout: timeout of the groups.
    """

    def __init__(self, planner: Planner, attention: tuple[float, float], timeout: timedelta) -> None:
        self._planner, self._attention = planner, attention
        self._rank = parallel_state.get_pipeline_model_parallel_rank()
        first, self._chunk = planner.placement.rank_of[0], planner.placement.chunk_of(0)
        self._sends = self._rank == first and parallel_state.get_tensor_model_parallel_rank() == 0
        self._group, self._sender = _group(self._sends, timeout)
        self._of_size = cache(planner.for_lengths)
        self._thread = ThreadPoolExecutor(1, "plan for lengths")
        self._next: Future[IterationPlan | None] | None = None
        self._sizes: IterationSizes | None = None
        self._now: IterationPlan | None = None
        self._reported = False
        compiled_climb()

    def begin(self, iterators: Sequence[Any], sizes: IterationSizes) -> IterationPlan | None:
        """Returns the plan of this iteration and hands out its samples in that order; None for the usual plan.

        An iteration that is run again uses the same plan. ``iterators`` has one for each chunk of this rank.
        """
        if get_rerun_state_machine().state not in _FIRST_RUN:
            return self._now
        read = [under(iterator) for iterator in iterators if iterator is not None]
        coming, self._next = self._next, None
        self._now = None if coming is None else coming.result()
        if coming is None or self._sizes != sizes:
            self._now = self._start(iterators, read, sizes).result()
        if self._now is not None:
            for iterator in read:
                iterator.hand_out(self._now.order)
            self._next = self._start(iterators, read, sizes)
        self._report_once()
        return self._now

    def _start(
        self, iterators: Sequence[Any], read: Sequence[ReadAhead], sizes: IterationSizes
    ) -> Future[IterationPlan | None]:
        own = iterators[self._chunk] if self._sends else None
        self._sizes = sizes
        return self._thread.submit(self._plan, read, None if own is None else under(own), sizes)

    def _plan(self, read: Sequence[ReadAhead], own: ReadAhead | None, sizes: IterationSizes) -> IterationPlan | None:
        n = sizes.microbatches
        for iterator in read:
            iterator.read(n)
        message: list[Any] = [_lengths(own, n) if self._sends else None]
        dist.broadcast_object_list(message, self._sender, self._group, torch.device("cpu"))
        (lengths,) = message
        if isinstance(lengths, str):
            raise ValueError(lengths)
        if lengths is None:
            return None
        planner: LengthsPlanner = self._of_size(n, self._attention)
        loads = MicrobatchLoads.of(lengths, sizes.sequence, sizes.rows)
        plan, usual = planner.plan(loads), planner.usual(loads)
        self._agree(plan)
        programs = proved(plan.schedule, plan.timeline.costs)
        less = 1 - plan.timeline.makespan / usual.timeline.makespan
        return IterationPlan(programs[self._rank], plan.order, plan.timeline, less)

    def _agree(self, plan: LengthsPlan) -> None:
        """Checks that all ranks of the replica have the same plan.

        Raises:
            RuntimeError: a rank has another plan.
        """
        digest = hashlib.sha256(repr((plan.order, plan.schedule.order)).encode()).digest()[:8]
        mine = torch.tensor([int.from_bytes(digest, "little", signed=True)])
        every = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(every, mine, self._group)
        if any(other != mine for other in every):
            raise RuntimeError(
                "--pipeline-plan-lengths: ranks of one pipeline have planned an iteration differently: their Python, "
                "numba or version of this package differ; give all the same"
            )

    def _report_once(self) -> None:
        if self._reported:
            return
        self._reported = True
        if self._now is None:
            said = "samples end within the first iteration: the usual plan is run"
        elif self._now.less > 0:
            said = f"the first iteration is planned to take {100 * self._now.less:.1f} % less than in the usual plan"
        else:
            said = "no better plan for the first iteration's lengths than the usual one"
        print_rank_0(f"pipeline schedule: planned for lengths: {said}")


def _lengths(read: ReadAhead | None, count: int) -> list[list[int]] | str | None:
    """Lengths of the next ``count`` samples, an error text if they are invalid, or None if the samples end before."""
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
    """Reorders ``losses`` from positions to the data loader's microbatches; an empty list stays empty."""
    if len(losses) != len(order):
        return list(losses)
    return [loss for _, loss in sorted(zip(order, losses, strict=True), key=lambda pair: pair[0])]


def _group(sends: bool, timeout: timedelta) -> tuple[dist.ProcessGroup, int]:
    """Gloo group of this rank's model replica, and the rank in it that sends lengths. Collective over all ranks."""
    mine = dist.get_process_group_ranks(parallel_state.get_model_parallel_group())
    by_rank = of_all_ranks((tuple(mine), sends))
    groups = {
        ranks: parallel_state.create_group(list(ranks), timeout=timeout, backend="gloo", group_desc="LENGTHS")
        for ranks in sorted({ranks for ranks, _ in by_rank})
    }
    (sender,) = (rank for rank in mine if by_rank[rank][1])
    return groups[tuple(mine)], sender


class ReadAhead:
    """Wraps the source of stock's iterator for one chunk. All other attributes are those of the source.

    Stock's iterator repeats its samples if an iteration is run again. So it must not see samples that are only read
    ahead.
    """

    def __init__(self, samples: Iterator[Any]) -> None:
        self._samples = samples
        self._handed_out: deque[Any] = deque()
        self._read: deque[Any] = deque()
        self._reading = threading.Lock()

    def read(self, count: int) -> list[Any]:
        """Returns the next ``count`` samples after those being handed out, without consuming them; fewer at the end."""
        with self._reading:
            while len(self._read) < count:
                try:
                    self._read.append(next(self._samples))
                except StopIteration:
                    break
            return [self._read[at] for at in range(min(count, len(self._read)))]

    def hand_out(self, order: Sequence[int]) -> None:
        """Hands out the next ``len(order)`` samples in that order, or in their original order if there are fewer."""
        missing = len(self.read(len(order))) < len(order)
        with self._reading:
            if not missing:
                samples = [self._read.popleft() for _ in order]
                self._handed_out.extend(samples[m] for m in order)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._handed_out:
            return self._handed_out.popleft()
        with self._reading:
            return self._read.popleft() if self._read else next(self._samples)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._samples, name)


def under(iterator: Any) -> ReadAhead:
    """Returns the wrapper below ``iterator``; inserts it on the first call.

    Raises:
        ValueError: ``iterator`` is not stock's.
    """
    if not isinstance(iterator, RerunDataIterator):
        raise ValueError(
            f"--pipeline-plan-lengths reads ahead under Megatron's own iterators, not {type(iterator).__name__}: "
            "leave the flag out"
        )
    if not isinstance(iterator.iterable, ReadAhead):
        iterator.iterable = ReadAhead(iterator.iterable)
    return iterator.iterable


def lengths_of(sample: Any) -> list[int]:
    """Lengths of the sequences of one microbatch from the data loader.

    Args:
        sample: has ``cu_seqlens``, shape (rows, bounds): each row's sequence bounds, padded with the last one; or
            ``tokens`` or another tensor of shape (rows, length), where each row is one sequence.

    Raises:
        ValueError: the sample has none of these.
    """
    bounds = sample.get("cu_seqlens") if isinstance(sample, dict) else None
    if isinstance(bounds, Tensor):
        steps = bounds.reshape(-1, bounds.shape[-1]).diff(dim=-1)
        return [int(step) for step in steps.flatten().tolist() if step > 0]
    for name in ("tokens", "labels", "position_ids"):
        tensor = sample.get(name) if isinstance(sample, dict) else None
        if isinstance(tensor, Tensor) and tensor.dim() == 2:
            rows, length = tensor.shape
            return [int(length)] * int(rows)
    raise ValueError(
        "--pipeline-plan-lengths: samples have neither cu_seqlens nor tokens, which tell their lengths: leave the flag "
        "out"
    )
