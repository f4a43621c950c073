"""Recompute and offload that the flags allow, and the costs of copies."""

from __future__ import annotations

from dataclasses import replace

from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.integration.flags.environment import whole_variable
from megatron.schedules.job.spec import JobSpec, Settings
from megatron.schedules.planner.request import Request
from megatron.schedules.runtime.free_host_memory import available_host_bytes
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.utils.errors import PlanError


def with_memory_saving(spec: JobSpec, request: Request) -> Request:
    """Returns ``request`` with the memory saving of ``--pipeline-save-memory``.

    Raises:
        PlanError: the flag cannot be read, or lacks a value.
    """
    saving, costs = spec.settings.saving, request.costs
    flag = FLAGS["recompute" if saving.recompute else "offload"]
    if saving.recompute and spec.recompute.granularity == "full":
        raise PlanError(
            f"{flag} does not go with --recompute-granularity full: both recompute whole layers; leave one of them out"
        )
    if (saving.recompute or saving.offload) and costs.memory is None:
        raise PlanError(f"{flag} needs the model's sizes: give their flags")
    if saving.offload and costs.memory is not None:
        costs = replace(costs, copy=_copy_time(spec.settings, costs, costs.memory.of_rank(request.ranks)))
    if request.schedule == "file":  # the file itself lists O and L
        return replace(request, costs=costs)
    return replace(request, costs=costs, recompute=saving.recompute, offload=saving.offload)


def _copy_time(settings: Settings, costs: Costs, rank_bytes: float) -> float:
    """Time to copy the activations of half a rank's layers in one direction.

    Raises:
        PlanError: neither the flags nor a cost file give it.
    """
    flag, gbps = FLAGS["offload"], settings.saving.gbps
    if gbps is not None and settings.costs is None:
        raise PlanError(
            f"{flag}={gbps:g} compares copies with passes, whose times are not known: give {FLAGS['costs']} in "
            "milliseconds, or a cost file"
        )
    if gbps is not None:
        return 1e3 * rank_bytes / 2 / (gbps * 1e9)
    if not costs.copy:
        raise PlanError(
            f"{flag} takes the speed of copies from {FLAGS['costs']} FILE.json: name one that has it, as "
            f"tools/profile_passes.py writes, or give {flag}=GB/s with {FLAGS['costs']} in milliseconds"
        )
    return costs.copy


def check_host(costs: Costs, microbatches: float, ranks: int, *, is_dry: bool) -> float:
    """Host memory for a rank's offloaded activations, bytes.

    Args:
        costs: costs of the plan.
        microbatches: largest number of microbatches that a rank offloads at the same time.
        ranks: pipeline ranks.
        is_dry: whether the job will run on another machine.

    Raises:
        PlanError: the host has too little memory for all its ranks.
    """
    if costs.memory is None or not microbatches:
        return 0.0
    each = microbatches * costs.memory.of_rank(ranks)
    here = whole_variable("LOCAL_WORLD_SIZE", 1)
    free = None if is_dry else available_host_bytes()
    if free is not None and each * here > free:
        raise PlanError(
            f"{FLAGS['offload']} takes {each / 2**30:.1f} GiB of host memory for each of {here} ranks, and this host "
            f"has {free / 2**30:.1f} GiB left: raise {FLAGS['memory_limit']}, or leave the flag out"
        )
    return each
