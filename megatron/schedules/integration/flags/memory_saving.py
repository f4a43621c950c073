"""What the flags allow a plan to recompute and to offload, and what copies cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.integration.flags.dry_run_machine import supposes
from megatron.schedules.integration.flags.environment import whole_variable
from megatron.schedules.measure.cost_profile import read_profile
from megatron.schedules.planner.request import Request
from megatron.schedules.runtime.free_host_memory import available_host_bytes
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.parsing import positive


def with_relief(args: Any, request: Request) -> Request:
    """``request`` as ``--pipeline-recompute`` and ``--pipeline-offload`` ask.

    Raises:
        PlanError: naming the flag that cannot be read, or what it lacks.
    """
    again, offload = args.pipeline_recompute or "none", args.pipeline_offload or "none"
    if again not in ("auto", "none"):
        raise PlanError(f"{FLAGS['again']} {again!r} is unknown: use auto or none")
    if again == "auto" and args.recompute_granularity == "full":
        raise PlanError(
            f"{FLAGS['again']} auto does not go with --recompute-granularity full: both do whole layers again; leave "
            "one of them out"
        )
    costs = request.costs
    if (again == "auto" or offload != "none") and costs.memory is None:
        raise PlanError(f"{FLAGS['again' if again == 'auto' else 'offload']} needs the model's sizes: give their flags")
    if offload != "none" and costs.memory is not None:
        costs = replace(costs, copy=_copy_time(args, offload, costs.memory.of_rank(request.ranks)))
    if request.schedule == "file":  # says itself what goes
        return replace(request, costs=costs)
    return replace(request, costs=costs, recompute=again == "auto", offload=offload != "none")


def _copy_time(args: Any, offload: str, rank_bytes: float) -> float:
    """Milliseconds in which the activations of half a rank's layers are copied, one way.

    Raises:
        PlanError: where neither the flags nor a profile say it.
    """
    flag, file = FLAGS["offload"], args.pipeline_schedule_costs_file
    if file is None and args.pipeline_schedule_costs is None:
        raise PlanError(
            f"{flag} compares copies with passes, whose times are not known: give {FLAGS['costs_file']}, or "
            f"{FLAGS['costs']} in milliseconds"
        )
    if offload == "auto":
        measured = None if file is None else read_profile(Path(file)).copy_time(args.pipeline_model_parallel_size)
        if measured is None:
            raise PlanError(
                f"{flag} auto takes the speed of copies from {FLAGS['costs_file']}, which does not have it: measure it "
                f"with tools/profile_passes.py, or give {flag} in GB/s"
            )
        return measured
    gbps = positive(flag, offload, "auto, none, or what a rank copies in a second, in GB, such as 25")
    assert gbps is not None
    return 1e3 * rank_bytes / 2 / (gbps * 1e9)


def check_host(args: Any, costs: Costs, microbatches: float) -> float:
    """The bytes that a rank's offloaded activations take of its host, where the busiest offloads so many at once.

    Raises:
        PlanError: where the host has less for all the ranks that run on it.
    """
    if costs.memory is None or not microbatches:
        return 0.0
    each = microbatches * costs.memory.of_rank(args.pipeline_model_parallel_size)
    ranks = whole_variable("LOCAL_WORLD_SIZE", 1)
    free = None if supposes(args) else available_host_bytes()
    if free is not None and each * ranks > free:
        raise PlanError(
            f"{FLAGS['offload']} takes {each / 2**30:.1f} GiB of host memory for each of {ranks} ranks, and this host "
            f"has {free / 2**30:.1f} GiB left: raise {FLAGS['memory_limit']}, or leave the flag out"
        )
    return each
