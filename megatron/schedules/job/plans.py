"""Plans for jobs that are described without Megatron, by command-line flags or from Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from megatron.schedules.estimate.build_flags import trained_model
from megatron.schedules.estimate.device_memory import RankMemory
from megatron.schedules.estimate.model_build import rank_memory, with_model
from megatron.schedules.estimate.models import built, find_model
from megatron.schedules.estimate.parallel_sizes import Sizes
from megatron.schedules.estimate.times import loads
from megatron.schedules.job import values
from megatron.schedules.job.memory_limit import with_memory_limit
from megatron.schedules.job.spec import JobSpec, Settings
from megatron.schedules.measure.cost_profile import CustomCosts, Profile, read_costs
from megatron.schedules.measure.profile_facts import CopyRates, copy_time
from megatron.schedules.planner.adaptive import chunk_choices, with_finer_chunks
from megatron.schedules.planner.registry import AUTO, Request, check_parts, stages, with_parts
from megatron.schedules.planner.service import Plan, make_plan
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.placement import check_size
from megatron.schedules.schedule.text_forms import from_csv
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.parsing import read_text
from megatron.schedules.utils.printable import counted
from megatron.schedules.utils.progress import Progress, unheard


class PipelinedModel:
    """A model on a pipeline.

    Args:
        model: name of the model, or a file with Megatron's flags.
        ranks: number of pipeline ranks.
        microbatches: microbatches in an iteration.
        shared: whether vocabulary parallelism is on.
    """

    def __init__(self, model: str, ranks: int, microbatches: int, *, shared: bool) -> None:
        args = find_model(model).trained(pipeline_model_parallel_size=ranks)
        samples, batch = args.micro_batch_size * microbatches, args.global_batch_size or 0
        self._data = batch // samples if batch and batch % samples == 0 else 1
        args.world_size = math.prod((args.tensor_model_parallel_size, args.context_parallel_size, ranks, self._data))
        self._args, self._shared = args, shared
        self._model = trained_model(args, built(args, shared=shared))
        self.layers = self._model.build.shape.layers

    @property
    def times(self) -> Costs:
        """Times of F, I and W, computed from the model's arithmetic."""
        return Costs(*loads(self._model.build).ratio)

    def costs(self, costs: Costs, stages: int, profile: Profile | None, *, placed: bool) -> Costs:
        """Adds the model's parts to ``costs``, see :func:`.model_build.with_model`."""
        return with_model(
            costs,
            self._model,
            stages,
            shared=self._shared,
            placed=placed,
            profile=profile,
            hides=self._args.overlap_moe_expert_parallel_comm,
        )

    @property
    def message_bytes(self) -> float:
        """Hidden states of one microbatch on one rank, bytes."""
        return self._model.message_bytes

    def ranks(self, plan: Plan) -> tuple[RankMemory, ...]:
        """Memory of each rank in ``plan``, which was made with :meth:`costs`."""
        return rank_memory(self._model, plan.schedule, plan.costs, plan.request)

    def __str__(self) -> str:
        """Describes the parallel sizes and batch sizes that the byte counts refer to."""
        args = self._args
        sizes = {"tensor": args.tensor_model_parallel_size, "context": args.context_parallel_size, "data": self._data}
        parallel = ", ".join(f"{name} {size}" for name, size in sizes.items())
        numbers = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
        quantized = self._model.build.quantized
        numbers += f" with linears in {quantized}" if quantized else ""
        shared = "with" if args.use_distributed_optimizer else "without"
        return f"micro batch {args.micro_batch_size}, {parallel} parallel, {numbers}, {shared} distributed optimizer"


class _Measured(NamedTuple):
    """Costs before other settings are applied.

    Args:
        costs: times of the passes.
        profile: cost file that a job measured; None otherwise.
        custom: cost file written by hand; None otherwise.
    """

    costs: Costs
    profile: Profile | None = None
    custom: CustomCosts | None = None


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
        model, flags: see :class:`JobPlans`.

    Raises:
        PlanError: a flag is wrong; the error names it.
    """
    choices = [values.schedule_choice(flags["schedule"], text) for text in schedules]
    if not schedules:
        choices = [values.ScheduleChoice(name, name) for name in default if name in with_parts(settings.parts)]
    csvs = [None if choice.file is None else read_text(choice.file, "csv") for choice in choices]
    given = [*settings.parts, *["csv"] * any(text is not None for text in csvs)]
    check_parts(given, [choice.name for choice in choices], flags)
    d, n = pipeline_size, microbatches
    for text in csvs if d is None or n is None else ():
        if text is not None:
            own = from_csv(text)
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
    specs = [
        JobSpec(replace(settings, schedule=choice), Sizes(d, d), microbatches=n, csv=text)
        for choice, text in zip(choices, csvs, strict=True)
    ]
    return JobPlans(specs, model, flags)


class JobPlans:
    """Jobs that differ only in their schedule, and their plans.

    Args:
        specs: one or more jobs with known sizes and microbatches.
        model: name of a model, or a file with Megatron's flags; None for equal stages.
        flags: the user's flag for each part of a request, see :meth:`.PlanError.told`, and for ``model``.

    Raises:
        PlanError: a flag is wrong; the error names it.
    """

    def __init__(self, specs: Sequence[JobSpec], model: str | None, flags: Mapping[str, str]) -> None:
        settings, self._flags, self.specs = specs[0].settings, flags, tuple(specs)
        self.ranks, self.microbatches = specs[0].sizes.pipeline, specs[0].microbatches or 1
        self._settings, self._limit = settings, settings.memory_limit
        shared = settings.vocabulary_parallel
        self.model = None if model is None else PipelinedModel(model, self.ranks, self.microbatches, shared=shared)
        self._measured = self._read()
        self.is_measured = self._measured.profile is not None
        known = self._measured.costs.model is not None or self.model is not None
        for part, is_given, what in (
            ("layers", settings.places_layers, "a layer"),
            ("shared_vocabulary", settings.vocabulary_parallel, "its output layer"),
        ):
            if is_given and not known:
                raise PlanError(
                    f"{flags[part]} goes with {flags['model']}, or a profile with the model's ends: what does {what} "
                    "cost?"
                )
        custom = self._measured.custom
        # Shares of memory in a custom cost file replace the model's bytes.
        self.instead_of_bytes = [] if custom is None else [f"{flags['costs']} $.{name}" for name in custom.of_memory]
        self.costs = self._costs(self.ranks, placed=False)
        if self._limit is not None and self._limit.is_measured:
            raise PlanError(
                f"{flags['memory_limit']} {self._limit.text} is for training, which measures it: give 0.5 or 20GiB"
            )

    @property
    def knows_bytes(self) -> bool:
        """True if memory is known in bytes."""
        return self.model is not None and not self.instead_of_bytes

    @property
    def microbatch_bytes(self) -> float:
        """Activation memory of one microbatch on an average rank, bytes; 0 if unknown."""
        return 0.0 if self.costs.memory is None else self.costs.memory.of_rank(self.ranks)

    def request(self, spec: JobSpec) -> Request:
        """Returns the planning request for ``spec``."""
        return with_finer_chunks(spec.settings.schedule.chunks, partial(self._request, spec), lambda request: request)

    def _request(self, spec: JobSpec, most: int | None) -> Request:
        """Like :meth:`request` with at most ``most`` chunks per rank; None for the default."""
        settings, choice = spec.settings, spec.settings.schedule
        request = Request(
            choice.name,
            self.ranks,
            self.microbatches,
            csv=spec.csv,
            decisions=Decisions(layers=settings.layers if isinstance(settings.layers, tuple) else None),
            partition=settings.searches_layers(known=self.costs.model is not None),
        )
        if choice.name not in ("adaptive", AUTO):
            request = request if choice.chunks is None else replace(request, chunks=choice.chunks)
            return replace(request, costs=self._costs(stages(request), placed=request.partition))
        request = replace(
            request,
            chunk_choices=chunk_choices(most or max(request.chunk_choices)),
            search_seconds=settings.search_seconds,
            recompute=settings.saving.recompute,
            offload=settings.saving.offload,
        )
        return self._limited(replace(request, costs=self._costs(stages(request), placed=request.partition)))

    def plan(self, spec: JobSpec, progress: Progress = unheard) -> Plan:
        """Plans ``spec``."""
        return make_plan(self.request(spec), progress)

    def compared(self, plan: Callable[[JobSpec], Plan] | None = None) -> Iterator[tuple[str, Plan | str, float | None]]:
        """Yields each schedule's name, its plan or the reason why there is none, and its throughput relative to 1F1B.

        Args:
            plan: makes one plan, for example :meth:`plan` or a function that also shows progress.
        """
        plan = plan or self.plan
        baseline = plan(self.specs[0].under("1f1b")).iteration_time
        for spec in self.specs:
            name = spec.settings.schedule.text
            try:
                found = plan(spec)
            except PlanError as error:
                yield name, str(error), None
            else:
                yield name, found, baseline / found.iteration_time

    def memory(self, plan: Plan) -> tuple[RankMemory, ...]:
        """Memory of each rank in ``plan``; empty if bytes are unknown."""
        return self.model.ranks(plan) if self.model is not None and self.knows_bytes else ()

    def _limited(self, request: Request) -> Request:
        if self._limit is None:
            return request
        size, held = self._limit.size, self._rank_bytes(request.costs)
        if size is not None and held is None:
            raise PlanError(
                f"{self._flags['memory_limit']} {self._limit.text} needs {self._flags['model']} or a profile in "
                f"{self._flags['costs']} that counted bytes: give one of these, or a fraction such as 0.5"
            )
        if self.model is not None or size is None or held is None:
            message = 0.0 if self.model is None else self.model.message_bytes
            return with_memory_limit(self._flags["memory_limit"], self._limit, request, message)
        return replace(request, memory_limit=size / (held * self.ranks))

    def _costs(self, number: int, *, placed: bool) -> Costs:
        """Costs for a plan with ``number`` stages. With ``placed`` the planner partitions the layers."""
        found, profile, custom = self._measured
        if self.model is not None:
            found = self.model.costs(found, number, profile, placed=placed)
        found = replace(found, shared_vocabulary=self._settings.vocabulary_parallel)
        if self.instead_of_bytes:
            found = replace(found, memory=None)
        return self._with_copies(found if custom is None else custom.added_to(found))

    def _with_copies(self, costs: Costs) -> Costs:
        """Adds the copy time, which offload needs, to ``costs``."""
        saving, flag, file = self._settings.saving, self._flags["offload"], f"{self._flags['costs']} FILE.json"
        if saving.gbps is not None:
            held = self._rank_bytes(costs)
            if held is None:
                raise PlanError(
                    f"{flag}={saving.gbps:g} needs bytes, from {self._flags['model']} or a profile in "
                    f"{self._flags['costs']}: give one of these, or offload and copy_time in a {file} (docs/costs.md)"
                )
            time = copy_time(CopyRates(*[saving.gbps] * 3), held / 2, both_ways=True)
            return replace(costs, copy=time or 0.0)
        if saving.offload and not costs.copy:
            raise PlanError(
                f"{flag} takes the time of copies from {file}: give copy_time in one written by hand (docs/costs.md), "
                "or a profile that has it, as tools/profile_passes.py writes"
            )
        return costs

    def _rank_bytes(self, costs: Costs) -> float | None:
        """Activation memory of one microbatch in an average rank's layers, bytes; None if unknown."""
        profile = self._measured.profile
        if costs.memory is not None:
            return costs.memory.of_rank(self.ranks)
        return profile.layer_bytes * profile.facts.layers / self.ranks if profile and profile.layer_bytes else None

    def _read(self) -> _Measured:
        choice, model = self._settings.costs, self.model
        usual = Costs() if model is None else model.times
        if choice is None:
            return _Measured(usual)
        if choice.file is None:
            return _Measured(choice.times or usual)
        found = read_costs(choice.file)
        if isinstance(found, CustomCosts):
            return _Measured(found.times or usual, custom=found)
        if model is not None and model.layers != found.facts.layers:
            raise PlanError(
                f"{self._flags['model']} has {model.layers} layers, and {choice.text} was measured for "
                f"{found.facts.layers}"
            )
        return _Measured(found.costs(self.ranks), profile=found)
