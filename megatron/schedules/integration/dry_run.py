"""Dry run: computes a job's plan and memory from its flags, without process groups, model or GPU."""

from __future__ import annotations

import sys
from typing import NoReturn

from megatron.schedules.estimate.parallel_sizes import Sizes
from megatron.schedules.integration.dry_run_advice import advice
from megatron.schedules.integration.flags.check import PlannedJob
from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.integration.flags.dry_run_machine import assumed_gpus
from megatron.schedules.integration.flags.planner import Planner
from megatron.schedules.integration.flags.refuse import refuse
from megatron.schedules.integration.memory_estimate import Estimate, estimated
from megatron.schedules.job.spec import JobSpec
from megatron.schedules.job.stage_layers import letters_by_stage
from megatron.schedules.job.values import DryRun
from megatron.schedules.planner.layer_partition import as_layout
from megatron.schedules.report.memory_table import NOT_COUNTED, Rank, as_text, verdict
from megatron.schedules.utils.errors import PlanError

# Exit status of a job that would not fit.
_DOES_NOT_FIT = 3


def dry_run(asked: PlannedJob, how: DryRun) -> NoReturn:
    """Prints the job's plan and memory on the first rank.

    Exits with 0, or with 3 if the job does not fit its device.
    """
    try:
        room, planner, pattern = how.device_bytes, Planner(asked), asked.spec.layers.pattern
        found = estimated(asked, planner) if pattern is None else None
        _, source = assumed_gpus(asked.spec.sizes, how.gpus)
    except PlanError as error:
        refuse(error.told(FLAGS))
    sys.stdout.write(f"{_heading(asked.spec.sizes, source)}\n{planner.summary()}\n")
    if found is None:
        sys.stdout.write(f"layers by stage: {'|'.join(letters_by_stage(pattern or '', asked.layers))}\n")
        sys.stdout.write("memory of hybrid models is not estimated so far\n")
        sys.stdout.flush()
        raise SystemExit(0)
    sys.stdout.write(f"{_table(found, planner, asked.spec)}\n")
    status = 0
    if room is not None:
        worst = found.ranks[found.worst]
        fits = worst.device <= room
        sys.stdout.write(verdict(found.worst, _rank(found, planner, found.worst), room) + "\n")
        if not fits:
            sys.stdout.write(advice(asked.spec, found, room) + "\n")
            status = _DOES_NOT_FIT
    sys.stdout.write(f"not counted: {NOT_COUNTED}\n")
    sys.stdout.flush()
    raise SystemExit(status)


def _heading(sizes: Sizes, source: str) -> str:
    parts = {"tensor": sizes.tensor, "context": sizes.context, "expert": sizes.expert, "pipeline": sizes.pipeline}
    parts["data"] = sizes.world // sizes.of_replica
    said = ", ".join(f"{name} {size}" for name, size in parts.items() if size > 1)
    return f"dry run, nothing is started: {sizes.world} GPUs ({source}), parallel: {said}"


def _table(found: Estimate, planner: Planner, spec: JobSpec) -> str:
    ranks = [_rank(found, planner, rank) for rank in range(planner.placement.ranks)]
    kernel = "in one kernel" if found.fused else "with its scores kept"
    how = spec.build and spec.build.quantized
    quantized = f", linears in {how}" if how else ""
    lines = [
        f"activations as layers of {spec.stock.transformer_impl} keep them, attention {kernel}{quantized}",
        f"layers by stage: {as_layout(found.counts, spec.layers.ahead)}",
        as_text(ranks).rstrip(),
    ]
    if not found.shape.vocabulary:
        lines.append("the vocabulary is not known: embedding and output layer are not counted; give --vocab-size")
    return "\n".join(lines)


def _rank(found: Estimate, planner: Planner, rank: int) -> Rank:
    each = found.ranks[rank]
    layers = tuple(found.counts[stage] for stage in planner.placement.stages_of(rank))
    return Rank(layers, each.parts, each.host)
