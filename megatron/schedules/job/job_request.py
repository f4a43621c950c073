"""Planning request of a job: for training, the command line and Python alike."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

from megatron.schedules.estimate.build_flags import GRAPHS
from megatron.schedules.estimate.model_build import MESSAGES
from megatron.schedules.job.job_costs import costs_of
from megatron.schedules.job.memory_limit import device_limit, with_memory_limit
from megatron.schedules.job.spec import Batch, JobSpec
from megatron.schedules.job.stage_layers import layers_by_stage, wrong_layers
from megatron.schedules.job.values import MemoryLimit, batch_steps
from megatron.schedules.planner.adaptive import chunk_choices, with_finer_chunks
from megatron.schedules.planner.registry import Request, stages
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.placement import check_size
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.printable import counted

# Chunks per rank that the planner may choose, if the user names no number.
_MOST_CHUNKS = 4


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
        return with_memory_limit(self.spec, self.limit, request, messages)


def request_of(spec: JobSpec, device: float | None = None) -> LimitedRequest:
    """Returns the planning request for ``spec``.

    Args:
        spec: the job, with its model, CSV and cost file.
        device: memory of a device, bytes, that ``auto`` has to keep within; None for no such limit.

    Raises:
        PlanError: a flag is wrong; the error names it.
    """
    make = partial(_request_of, spec, device)
    return with_finer_chunks(spec.settings.schedule.chunks, make, lambda made: made.request)


def _request_of(spec: JobSpec, device: float | None, most_chunks: int | None) -> LimitedRequest:
    """Like :func:`request_of` with at most ``most_chunks`` chunks per rank, if the planner chooses; None: 4."""
    settings, choice = spec.settings, spec.settings.schedule
    microbatches = _microbatches(spec) if spec.microbatches is None else spec.microbatches
    request = Request(choice.name, spec.sizes.pipeline, microbatches, csv=spec.csv)
    if choice.file is not None:
        request = replace(request, csv_name=choice.file.name)
    limit = None
    if choice.is_searched:
        limit = settings.memory_limit
        request = replace(
            request,
            chunk_choices=dividing_chunks(spec, most_chunks or _MOST_CHUNKS),
            search_seconds=settings.search_seconds,
            recompute=settings.saving.recompute,
            offload=settings.saving.offload,
        )
    elif choice.chunks is not None:
        request = replace(request, chunks=choice.chunks)
    costs = costs_of(spec, of_device=device is not None)
    request = replace(
        request,
        costs=costs,
        decisions=Decisions(layers=_layers_of(spec, stages(request))),
        partition=settings.layers == "auto",
        divides=spec.layers.count is not None and settings.layers != "auto",
        alike=spec.stock.cuda_graphs == GRAPHS,
    )
    if device is not None and spec.trained is not None and costs.in_bytes is not None:
        limit = device_limit(spec.trained, request, device)
    limited = LimitedRequest(spec, request, limit)
    return limited._replace(request=limited.within(request))


def _layers_of(spec: JobSpec, stages: int) -> tuple[int, ...] | None:
    """Decoder layers of each stage, if flags set them."""
    layers = spec.settings.layers
    if spec.layers.count is None or not (spec.by_megatron or spec.layers.segmented):  # the planner compares them
        return layers if isinstance(layers, tuple) else None
    by_hand = spec.layers.by_hand or isinstance(layers, tuple)
    known = by_hand and not _by_ends(spec) and not wrong_layers(spec.layers, stages, layers)
    return layers_by_stage(spec.layers, stages, layers) if known else None


def dividing_chunks(spec: JobSpec, most: int) -> tuple[int, ...]:
    """Numbers of chunks up to ``most`` that divide the layers; only the largest if flags set the layers of each stage.

    If no number divides the layers, the rule about layers refuses a job in training, which gets one number.
    """
    size, layers, stock = spec.sizes.pipeline, spec.settings.layers, spec.layers
    if layers == "auto" or stock.count is None:
        return chunk_choices(most)
    dividing = tuple(chunks for chunks in range(1, most + 1) if not wrong_layers(stock, chunks * size, layers))
    depends = (stock.by_hand or spec.settings.places_layers) and not _by_ends(spec)
    return (dividing[-1:] if depends else dividing) or ((1,) if spec.by_megatron else chunk_choices(most))


def _by_ends(spec: JobSpec) -> bool:
    """Returns whether flags set only the layers of the first and last stage, which the model's costs know."""
    stock, layers = spec.layers, spec.settings.layers
    return spec.trained is not None and stock.layout is None and not stock.segmented and not isinstance(layers, tuple)


def _microbatches(spec: JobSpec) -> int:
    """Number of microbatches as Megatron will compute it.

    Megatron's own error would come only after process groups start.
    """
    sizes, chunks, micro = spec.sizes, spec.settings.schedule.chunks, spec.batch.micro
    data_parallel, rest = divmod(sizes.world, sizes.of_replica)
    if rest or not data_parallel:
        dry_run = f"{spec.flags['dry_run']} {sizes.world}: " if spec.settings.dry_run else ""
        raise PlanError(
            f"{dry_run}{sizes.world} processes do not divide into tensor x pipeline x context parallel = "
            f"{sizes.of_replica} ranks; start a multiple of {sizes.of_replica}"
        )
    if micro is None:
        raise PlanError("--micro-batch-size is missing: give the samples of a microbatch, 1 or more")
    samples = micro * data_parallel
    flag, batches = _batches(spec.batch, samples)
    # Batch sizes of earlier steps may not divide over the current GPUs; Megatron allows this.
    fitting = [batch for batch in batches if batch > 0 and batch % samples == 0]
    if not fitting:
        raise PlanError(
            f"{flag} {batches[0]} gives {batches[0] / samples:g} microbatches; it must be 1 or more times "
            f"--micro-batch-size {micro} x data parallel {data_parallel} = {samples}"
        )
    for batch in fitting:
        size, microbatches = sizes.pipeline, batch // samples
        chunks_too = "" if chunks is None else f" and {chunks} chunks in {spec.flags['schedule']}"
        said = f"{spec.flags['ranks']} {size} with {flag} {batch}, {counted(microbatches, 'microbatch')}{chunks_too},"
        check_size(size, microbatches, chunks, said)
    return fitting[0] // samples


def _batches(batch: Batch, samples: int) -> tuple[str, list[int]]:
    """Flag that sets the global batch size, and its sizes in the order of training."""
    flag, text = "--step-batch-size-schedule", batch.steps
    if text is None:
        return "--global-batch-size", [samples if batch.whole is None else batch.whole]
    return flag, batch_steps(flag, text)
