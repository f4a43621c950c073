"""Dry run: computes a job's plan and memory from its flags, without process groups, model or GPU."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import NoReturn

from megatron.schedules.estimate.build_flags import GRAPHS
from megatron.schedules.estimate.parallel_sizes import ParallelSizes
from megatron.schedules.integration.environment import ONE_REPLICA, assumed_gpus
from megatron.schedules.integration.flags.checks import made, planned
from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.integration.late_imports import TooEarlyError
from megatron.schedules.integration.refuse import refuse
from megatron.schedules.job.machine import Machine
from megatron.schedules.job.plan_job import JobPlan, plan_job
from megatron.schedules.job.plan_summary import summary
from megatron.schedules.job.spec import JobSpec
from megatron.schedules.job.stage_layers import written
from megatron.schedules.job.values import DryRun
from megatron.schedules.planner.registry import AUTO
from megatron.schedules.report.memory_table import NOT_COUNTED, NOT_COUNTED_OF_GRAPHS, Rank, as_text, verdict
from megatron.schedules.report.table import gib
from megatron.schedules.schedule.graph_slots import graph_slots
from megatron.schedules.utils.errors import PlanError

# Exit status of a job that would not fit.
_DOES_NOT_FIT = 3


def dry_run(job: JobPlan) -> NoReturn:
    """Prints the job's plan and memory on the first rank.

    Exits with 0, or with 3 if the job does not fit its device.
    """
    how = job.spec.settings.dry_run or DryRun()
    room = how.device_bytes
    try:
        _, source = assumed_gpus(job.spec.sizes, how.gpus)
    except PlanError as error:
        refuse(error.told(FLAGS))
    if not job.memory:
        refuse(f"{FLAGS['dry_run']} needs the model's sizes: give their flags")
    sys.stdout.write(f"{_heading(job.spec.sizes, source)}\n{summary(job)}\n")
    sys.stdout.write(f"{_table(job)}\n")
    status = 0
    if room is not None:
        sys.stdout.write(verdict(job.worst, _rank(job, job.worst), room) + "\n")
        if not job.fits(room):
            sys.stdout.write(_advice(job, room) + "\n")
            status = _DOES_NOT_FIT
    sys.stdout.write(f"not counted: {NOT_COUNTED_OF_GRAPHS.get(job.spec.stock.cuda_graphs, '')}{NOT_COUNTED}\n")
    sys.stdout.flush()
    raise SystemExit(status)


def dry_run_early(spec: JobSpec) -> None:
    """Ends the process as :func:`dry_run` if the job asks for that, and its plan does not need Megatron."""
    if spec.settings.dry_run is not None:
        with suppress(TooEarlyError):
            dry_run(planned(spec))


def _heading(sizes: ParallelSizes, source: str) -> str:
    parts = {"tensor": sizes.tensor, "context": sizes.context, "expert": sizes.expert, "pipeline": sizes.pipeline}
    parts["data"] = sizes.world // sizes.of_replica
    said = ", ".join(f"{name} {size}" for name, size in parts.items() if size > 1)
    if source == ONE_REPLICA:
        source = f"{source}; {FLAGS['dry_run']} GPUS says another number"
    return f"dry run, nothing is started: {sizes.world} GPUs ({source}), parallel: {said}"


def _table(job: JobPlan) -> str:
    spec, build = job.spec, job.spec.build
    assert build is not None, "memory is known"
    kernel = "in one kernel" if build.shape.fused else "with its scores kept"
    layers = "transformer_engine" if build.contiguous else "local"
    quantized = f", linears in {build.quantized}" if build.quantized else ""
    lines = [
        f"activations as layers of {layers} keep them, attention {kernel}{quantized}",
        f"layers by stage: {written(spec.layers, job.layers)}",
        as_text([_rank(job, rank) for rank in range(job.schedule.ranks)]).rstrip(),
    ]
    if spec.stock.cuda_graphs == GRAPHS:
        lines.append(_graphs(job))
    if not build.shape.vocabulary:
        lines.append("the vocabulary is not known: embedding and output layer are not counted; give --vocab-size")
    return "\n".join(lines)


def _graphs(job: JobPlan) -> str:
    """Says how many graphs the rank with the most of them captures."""
    slots = [graph_slots(row).items() for row in job.schedule.order]
    sets = [{(stage, slot) for (stage, _), slot in row} for row in slots]
    worst = max(range(len(sets)), key=lambda rank: len(sets[rank]))
    return (
        f"CUDA graphs: rank {worst} captures the layers of a stage {len(sets[worst])} times, in "
        f"{len({slot.number for _, slot in sets[worst]})} slots, not once for each of {len(slots[worst])} microbatches "
        "of stages"
    )


def _rank(job: JobPlan, rank: int) -> Rank:
    layers = tuple(job.layers[stage] for stage in job.schedule.placement.stages_of(rank))
    return Rank(layers, job.memory[rank].parts, job.memory[rank].host)


def _advice(job: JobPlan, room: float) -> str:
    """Plans ``auto``, and returns whether that would fit or what else to do."""
    flag = f"{FLAGS['schedule']} {AUTO}"
    if job.spec.settings.schedule.name == AUTO and job.spec.settings.memory_limit is None:
        return f"nothing that {AUTO} may choose fits: use more GPUs"
    try:
        other = plan_job(job.spec.under(AUTO), Machine(room), made)
    except PlanError:
        other = job
    held = gib(other.memory[other.worst].device)
    return f"would fit: with {flag} ({held} GiB)" if other.fits(room) else f"nor does {flag} fit: use more GPUs"
