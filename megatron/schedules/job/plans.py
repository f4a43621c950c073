"""Plans for jobs that are described without Megatron, by command-line flags or from Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron.schedules.estimate.build_flags import numbers, stand_in, stock_recompute
from megatron.schedules.estimate.layer_pattern import hybrid_layers
from megatron.schedules.estimate.models import built, find_model
from megatron.schedules.estimate.parallel_sizes import ParallelSizes, sizes_of
from megatron.schedules.job import values
from megatron.schedules.job.job_costs import costs_of
from megatron.schedules.job.plan_job import JobPlan, plan_job
from megatron.schedules.job.spec import Batch, JobModel, JobSpec, Settings, StockLayers
from megatron.schedules.job.stage_layers import wrong_layers
from megatron.schedules.planner.registry import check_parts, with_parts
from megatron.schedules.schedule.placement import check_size
from megatron.schedules.schedule.text_forms import from_csv
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.parsing import read_text
from megatron.schedules.utils.printable import counted


def job_plans(
    schedules: Sequence[str],
    default: Sequence[str],
    settings: Settings,
    pipeline_size: int | None,
    microbatches: int | None,
    model: str | None,
    flags: Mapping[str, str],
) -> JobPlans:
    """Describes a job for each schedule.

    Args:
        schedules: schedules as the user wrote them. The first CSV sets the sizes that are None.
        default: schedules used if the user names none. Those that lack a required setting are left out.
        settings: settings of all jobs, except the schedule.
        pipeline_size, microbatches: d and n.
        model: name of a model, or a file with Megatron's flags; None for equal stages.
        flags: the user's flag for each part of a request, see :meth:`.PlanError.told`, and for ``model``.

    Raises:
        PlanError: a flag is wrong; the error names it.
    """
    choices = [values.schedule_choice(flags["schedule"], text) for text in schedules]
    if not schedules:
        choices = [values.ScheduleChoice(name, name) for name in default if name in with_parts(settings.parts)]
    job = JobSpec(settings, ParallelSizes(0, 0), flags=flags).read()
    csvs = [None if choice.file is None else read_text(choice.file, "csv") for choice in choices]
    given = [*settings.parts, *["csv"] * any(text is not None for text in csvs)]
    check_parts(given, [choice.name for choice in choices], flags)
    d, n = pipeline_size, microbatches
    for choice, text in zip(choices, csvs, strict=True) if d is None or n is None else ():
        if choice.file is not None and text is not None:
            own = from_csv(text, choice.file.name)
            d, n = d or own.ranks, n or own.microbatches
            if d < 2:
                raise PlanError("the CSV has one row, and a pipeline has 2 ranks or more", "csv")
    if d is None:
        raise PlanError(f"{flags['ranks']} is missing: give the number of pipeline ranks, 2 or more")
    if n is None:
        raise PlanError(f"{flags['microbatches']} is missing: give the number of microbatches in an iteration")
    most = max((choice.chunks for choice in choices if choice.chunks is not None), default=None)
    chunks_too = "" if most is None else f" and {counted(most, 'chunk')} in {flags['schedule']}"
    check_size(d, n, most, f"{flags['ranks']} {d} with {flags['microbatches']} {n}{chunks_too}")
    known: dict[str, Any] = {"sizes": ParallelSizes(d, d)}
    precision = ""
    if model is not None:
        args = find_model(model).trained(pipeline_model_parallel_size=d)
        known, precision = _of_model(args, n, model, flags), "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
    job = replace(job, microbatches=n, **known)
    specs = [
        replace(job, settings=replace(settings, schedule=choice), csv=text)
        for choice, text in zip(choices, csvs, strict=True)
    ]
    return JobPlans(specs, precision)


def _of_model(args: Any, microbatches: int, model: str, flags: Mapping[str, str]) -> dict[str, Any]:
    """Fields of a :class:`.JobSpec` that Megatron's parsed ``args`` give. Data parallelism follows from the batch.

    Raises:
        PlanError: the microbatches do not divide the batch.
    """
    sizes, micro = sizes_of(args), args.micro_batch_size
    batch = args.global_batch_size or micro * microbatches
    data, rest = divmod(batch, micro * microbatches)
    if rest or not data:
        whole = batch // micro
        divisors = {n for low in range(1, math.isqrt(whole) + 1) if whole % low == 0 for n in (low, whole // low)}
        near = min(divisors, key=lambda n: abs(n - microbatches), default=1)
        file = model.partition(" --")[0]
        raise PlanError(
            f"{flags['microbatches']} {microbatches} does not divide the batch of {flags['model']} {file}, "
            f"--global-batch-size {batch} with --micro-batch-size {micro}, over data-parallel ranks: give "
            f"{flags['microbatches']} {near}, or another batch behind the file's name"
        )
    return model_fields(args, sizes.of_replica * data)


def model_fields(args: Any, world: int) -> dict[str, Any]:
    """Fields of a :class:`.JobSpec` of ``world`` GPUs that Megatron's parsed ``args`` give."""
    hybrid = hybrid_layers(args)
    return {
        "sizes": sizes_of(args, world),
        "batch": Batch(args.micro_batch_size),
        "layers": StockLayers(args.num_layers, stand_in=stand_in(args), pattern=hybrid and hybrid.pattern),
        "recompute": stock_recompute(args),
        "vocabulary_multiple": args.make_vocab_size_divisible_by,
        "model": JobModel(built(args), numbers(args)),
        "hides_messages": bool(args.overlap_moe_expert_parallel_comm) or None,
    }


class JobPlans:
    """Jobs that differ only in their schedule, and their plans.

    Args:
        specs: one or more complete jobs.
        precision: the model's precision, for people; empty without a model.

    Raises:
        PlanError: a flag is wrong; the error names it.
    """

    def __init__(self, specs: Sequence[JobSpec], precision: str = "") -> None:
        self.specs, self._precision = tuple(specs), precision
        spec = self.specs[0]
        self.ranks, self.microbatches = spec.sizes.pipeline, spec.microbatches or 1
        self.is_measured, settings, flags = spec.profile is not None, spec.settings, spec.flags
        for part, is_given, what in (
            ("layers", settings.places_layers, "a layer"),
            ("shared_vocabulary", settings.vocabulary_parallel, "its output layer"),
        ):
            if is_given and not spec.knows_layers:
                raise PlanError(
                    f"{flags[part]} goes with {flags['model']}, or a profile with the model's ends: what does {what} "
                    "cost?"
                )
        if settings.measures_limit and settings.memory_limit is not None:
            raise PlanError(
                f"{flags['memory_limit']} {settings.memory_limit.text} is for training, which measures it: give 0.5 or "
                "20GiB"
            )
        self.costs = costs_of(spec)

    @property
    def has_model(self) -> bool:
        """True if the model is given, beside measured costs."""
        return self.specs[0].model is not None

    @property
    def instead_of_bytes(self) -> list[str]:
        """Fields of a cost file written by hand that replace the model's bytes."""
        custom, costs = self.specs[0].custom_costs, self.specs[0].flags["costs"]
        return [] if custom is None else [f"{costs} $.{name}" for name in custom.of_memory]

    @property
    def knows_bytes(self) -> bool:
        """True if memory is known in bytes."""
        return self.has_model and not self.instead_of_bytes

    @property
    def counted_for(self) -> str:
        """Describes the parallel sizes and batch sizes that the byte counts refer to."""
        spec = self.specs[0]
        sizes, build = spec.sizes, spec.build
        data = sizes.world // sizes.of_replica
        parallel = f"tensor {sizes.tensor}, context {sizes.context}, data {data} parallel"
        quantized = f" with linears in {build.quantized}" if build is not None and build.quantized else ""
        shared = "with" if sizes.optimizer_instances else "without"
        return (
            f"micro batch {spec.batch.micro}, {parallel}, {self._precision}{quantized}, {shared} distributed optimizer"
        )

    @property
    def microbatch_bytes(self) -> float:
        """Activation memory of one microbatch on an average rank, bytes; 0 if unknown."""
        return 0.0 if self.costs.in_bytes is None else self.costs.in_bytes.of_rank(self.ranks)

    def has_uneven_stages(self, job: JobPlan) -> bool:
        """True if the model's layers do not divide by the stages of ``job``, and no flag places them."""
        if not self.has_model or job.plan.decisions.layers is not None:
            return False
        return bool(wrong_layers(self.specs[0].layers, job.schedule.placement.stages))

    def compared(
        self, plan: Callable[[JobSpec], JobPlan] = plan_job
    ) -> Iterator[tuple[str, JobPlan | str, float | None]]:
        """Yields each schedule's name, its plan or the reason why there is none, and its throughput relative to 1F1B.

        The base is the job's own 1F1B: with its recompute, and with the layers that its flags set.

        Args:
            plan: makes one plan, for example :func:`.plan_job` with something that shows progress.
        """
        baseline = plan(self.specs[0].under("1f1b")).plan.iteration_time
        for spec in self.specs:
            name = spec.settings.schedule.text
            try:
                job = plan(spec)
            except PlanError as error:
                yield name, str(error), None
            else:
                yield name, job, baseline / job.plan.iteration_time
