"""Plans that hold the least memory, for where the search of ``auto`` finds no room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product

from megatron.schedules.job.job_request import request_of
from megatron.schedules.job.spec import JobSpec
from megatron.schedules.planner.adaptive import least_limit
from megatron.schedules.planner.registry import AUTO, named_within
from megatron.schedules.planner.request import Request, of_1f1b
from megatron.schedules.planner.service import Plan, by_name
from megatron.schedules.utils.errors import PlanError

# Search time of a plan that holds little more than one microbatch: there is next to nothing to choose.
_SECONDS = 0.1
_MOST_CHUNKS = 8
# Memory limits, in multiples of what one microbatch at a time takes: a little more makes plans much shorter.
_LIMITS = (1.0, 1.2, 1.5)


def least_plans(spec: JobSpec, make: Callable[[Request], Plan]) -> Iterator[Plan]:
    """Yields plans of ``auto`` for a job, without its memory limit: each schedule by name, and those of least memory.

    The latter hold little more than one microbatch at a time, on each number of chunks that divides the layers
    and that the job allows.

    Args:
        spec: the job, with the layers and the memory saving that all plans have.
        make: makes a plan.
    """
    asked = replace(request_of(spec.under("adaptive", saving=spec.settings.saving)).request, schedule=AUTO)
    least: Plan | None = None
    most = spec.settings.schedule.chunks or _MOST_CHUNKS
    for chunks, times in product(range(1, most + 1), _LIMITS):
        with suppress(PlanError):  # the layers do not divide
            request = replace(asked, schedule="adaptive", chunk_choices=(chunks,), search_seconds=_SECONDS)
            plan = make(replace(request, memory_limit=times * least_limit(request)))
            peak, unit = plan.peak_bytes, request.costs.in_bytes
            assert peak is not None and unit is not None, "sizes are known"
            within = of_1f1b(peak, request.ranks, unit.of_rank(request.ranks))
            least = replace(plan, asked=asked, request=replace(plan.request, memory_limit=within))
            yield least
    if least is not None:
        for line in named_within(asked):
            yield by_name(least, line)
