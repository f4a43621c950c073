"""Plans that hold the least memory, for where the search of ``auto`` finds no room."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from megatron.schedules.job.job_request import dividing_chunks, request_of
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


def try_least(spec: JobSpec, make: Callable[[Request], Plan], fits: Callable[[Plan], bool]) -> None:
    """Tries plans of ``auto`` for a job, without its memory limit: those of least memory, and each schedule by name.

    The former hold little more than one microbatch at a time, on each number of chunks that divides the layers
    and that the job allows.

    Args:
        spec: the job, with the layers and the memory saving that all plans have.
        make: makes a plan.
        fits: takes each plan and returns whether it fits. Where one does not, no plan with more memory is made.
    """
    asked = replace(request_of(spec.under("adaptive", saving=spec.settings.saving)).request, schedule=AUTO)
    least: Plan | None = None
    for chunks in dividing_chunks(spec, spec.settings.schedule.chunks or _MOST_CHUNKS):
        with suppress(PlanError):  # too few layers
            request = replace(asked, schedule="adaptive", chunk_choices=(chunks,), search_seconds=_SECONDS)
            for times in _LIMITS:
                plan = make(replace(request, memory_limit=times * least_limit(request)))
                peak, unit = plan.peak_bytes, request.costs.in_bytes
                assert peak is not None and unit is not None, "sizes are known"
                within = of_1f1b(peak, request.ranks, unit.of_rank(request.ranks))
                least = replace(plan, asked=asked, request=replace(plan.request, memory_limit=within))
                if not fits(least):
                    break
    if least is not None:
        for line in named_within(asked):
            fits(by_name(least, line))
