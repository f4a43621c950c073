"""Planning request of a job."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

from megatron.schedules.estimate.model_build import MESSAGES
from megatron.schedules.integration.flags.automatic import device_bytes, device_limit
from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.integration.flags.job_costs import costs_of, layers_of
from megatron.schedules.integration.flags.replan_checks import with_first_limit
from megatron.schedules.integration.flags.save_memory import with_memory_saving
from megatron.schedules.integration.late_imports import after_megatron
from megatron.schedules.integration.layers.by_stage import wrong_layers
from megatron.schedules.job.memory_limit import with_memory_limit
from megatron.schedules.job.spec import Batch, JobSpec
from megatron.schedules.job.values import MemoryLimit, schedule_choice
from megatron.schedules.planner.adaptive import chunk_choices, placements, with_finer_chunks
from megatron.schedules.planner.registry import AUTO, Request, placement, stages
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.placement import Placement, check_size
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.parsing import read_text
from megatron.schedules.utils.printable import counted


class LimitedRequest(NamedTuple):
    """A planning request and its memory limit.

    Args:
        spec: the job.
        request: its planning request.
        limit: the flag's limit, or for ``auto`` without the flag the devices' free memory; None without a limit.
    """

    spec: JobSpec
    request: Request
    limit: MemoryLimit | None

    def within(self, request: Request, messages: int = MESSAGES) -> Request:
        """Returns ``request`` with the limit, less the memory of ``messages`` messages per rank."""
        if self.limit is None:
            return request
        if self.limit.is_measured:
            return with_first_limit(request)
        message = 0.0 if self.spec.trained is None else self.spec.trained.message_bytes
        by_user = self.spec.settings.memory_limit is not None
        named = FLAGS["memory_limit"] if by_user else f"{FLAGS['schedule']} {AUTO}: the memory that devices have left,"
        return with_memory_limit(named, self.limit, request, message, messages)


def request_of(spec: JobSpec) -> LimitedRequest:
    """Returns the planning request for ``spec``.

    Raises:
        PlanError: a flag is wrong; the error names it.
    """
    return with_finer_chunks(spec.settings.schedule.chunks, partial(_request_of, spec), lambda found: found.request)


def _request_of(spec: JobSpec, most_chunks: int | None) -> LimitedRequest:
    """Like :func:`request_of` with at most ``most_chunks`` chunks per rank, if the planner chooses; None: 4."""
    settings, choice = spec.settings, spec.settings.schedule
    request = Request(
        schedule=choice.name,
        ranks=spec.sizes.pipeline,
        microbatches=_microbatches(spec),
        chunks=choice.chunks or 2,
        csv=spec.csv,
    )
    searched = request.schedule in ("adaptive", AUTO)
    if searched:
        choices = _chunk_choices(spec, most_chunks or 4)
        request = replace(request, search_seconds=settings.search_seconds, chunk_choices=choices)
    number = stages(request)
    device = device_bytes(spec)
    request = replace(
        request,
        costs=costs_of(spec, number, reserves=device is not None),
        decisions=Decisions(layers=layers_of(spec, number)),
        partition=settings.layers == "auto",
    )
    request = with_memory_saving(spec, request)
    limit = settings.memory_limit
    if device is not None and spec.trained is not None and request.costs.memory is not None:
        limit = device_limit(spec.trained, request, device)
    found = LimitedRequest(spec, request, limit)
    return found._replace(request=found.within(request))


def _chunk_choices(spec: JobSpec, most: int) -> tuple[int, ...]:
    """Numbers of chunks up to ``most`` that divide the layers; only the largest if costs depend on the number.

    If no number divides the layers, returns one number, and the rule about layers refuses the job.
    """
    size, layers = spec.sizes.pipeline, spec.settings.layers
    if layers == "auto":
        return chunk_choices(most)
    found = tuple(chunks for chunks in range(1, most + 1) if not wrong_layers(spec.layers, chunks * size, layers))
    depends = spec.layers.by_hand or spec.settings.places_layers or spec.recompute.method == "block"
    return (found[-1:] if depends else found) or (1,)


def _microbatches(spec: JobSpec) -> int:
    """Number of microbatches as Megatron will compute it.

    Megatron's own error would come only after process groups start.
    """
    sizes, chunks, micro = spec.sizes, spec.settings.schedule.chunks, spec.batch.micro
    data_parallel, rest = divmod(sizes.world, sizes.of_replica)
    if rest or not data_parallel:
        dry_run = f"{FLAGS['dry_run']} {sizes.world}: " if spec.settings.dry_run else ""
        raise PlanError(
            f"{dry_run}{sizes.world} processes do not divide into tensor x pipeline x context parallel = "
            f"{sizes.of_replica} ranks; start a multiple of {sizes.of_replica}"
        )
    if micro is None:
        raise PlanError("--micro-batch-size is missing: give the samples of a microbatch, 1 or more")
    each = micro * data_parallel
    flag, batches = _batches(spec.batch, each)
    # Batch sizes of earlier steps may not divide over the current GPUs; Megatron allows this.
    fitting = [batch for batch in batches if batch > 0 and batch % each == 0]
    if not fitting:
        raise PlanError(
            f"{flag} {batches[0]} gives {batches[0] / each:g} microbatches; it must be 1 or more times "
            f"--micro-batch-size {micro} x data parallel {data_parallel} = {each}"
        )
    for batch in fitting:
        size, microbatches = sizes.pipeline, batch // each
        chunks_too = "" if chunks is None else f" and {chunks} chunks in {FLAGS['schedule']}"
        said = f"{FLAGS['ranks']} {size} with {flag} {batch}, {counted(microbatches, 'microbatch')}{chunks_too},"
        check_size(size, microbatches, chunks, said)
    return fitting[0] // each


def _batches(batch: Batch, each: int) -> tuple[str, list[int]]:
    """Flag that sets the global batch size, and its sizes in the order of training."""
    flag, text = "--step-batch-size-schedule", batch.steps
    if text is None:
        return "--global-batch-size", [each if batch.whole is None else batch.whole]
    try:
        calculator = after_megatron("megatron.core.num_microbatches_calculator")
        steps = calculator.StepBatchsizeNumMicroBatchesCalculator._parse_schedule(text, None)
    except ValueError:
        steps = []
    if not steps:
        raise PlanError(f"{flag} {text!r} is not a list of TOKENS:BATCH such as '0:768 250B:1536'")
    return flag, [size for _, size in steps]


def placement_with(schedule: str, ranks: int, chunks: int) -> Placement:
    """Position of the stages of a model that a training loop builds, which planning keeps.

    Args:
        schedule: value of ``--pipeline-schedule``, checked before.
        ranks: pipeline ranks.
        chunks: model chunks of each rank.
    """
    choice = schedule_choice(FLAGS["schedule"], schedule)
    csv = None if choice.file is None else read_text(choice.file, "csv")
    request = Request(schedule=choice.name, ranks=ranks, microbatches=1, chunks=choice.chunks or chunks, csv=csv)
    return placement(request) or placements(replace(request, chunk_choices=(chunks,)))[0]
