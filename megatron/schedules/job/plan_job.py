"""The one way from a job's description to its plan, for the command line, Python, dry runs and training alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from megatron.schedules.estimate.device_memory import RESERVED, RankMemory, usable
from megatron.schedules.estimate.model_build import MESSAGES, hidden_states, rank_memory
from megatron.schedules.job.auto_choices import auto_choices, without_recompute
from megatron.schedules.job.job_costs import assumed
from megatron.schedules.job.job_request import LimitedRequest, request_of
from megatron.schedules.job.least_memory import try_least
from megatron.schedules.job.machine import ANY, Machine
from megatron.schedules.job.memory_limit import too_small
from megatron.schedules.job.rules import refusal, unlogged, unsplittable
from megatron.schedules.job.spec import JobSpec
from megatron.schedules.job.stage_layers import layers_by_stage
from megatron.schedules.job.values import MemorySaving
from megatron.schedules.planner.adaptive import limit_in_microbatches
from megatron.schedules.planner.registry import AUTO, Request
from megatron.schedules.planner.service import Plan, by_name, make_plan, or_named
from megatron.schedules.programs.checker import proved
from megatron.schedules.programs.program import Program
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.host_memory import taken
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.utils.errors import PlanError, ShortMemoryError
from megatron.schedules.utils.printable import amount, percent

Make = Callable[[Request], Plan]
"""Makes a plan, and may show how far it is."""

_GIB = 2.0**30


@dataclass(frozen=True)
class JobPlan:
    """A job and its plan.

    Args:
        spec: the job, with everything that ``auto`` chose.
        plan: its plan.
        left_out: a sentence about Megatron's own recompute, if the plan goes without it or could; empty otherwise.
        too_much: bytes beyond what a plan may use of a device, if ``auto`` knows no plan that fits; otherwise 0.
    """

    spec: JobSpec
    plan: Plan
    left_out: str = field(default="", compare=False)
    too_much: float = field(default=0.0, compare=False)

    @property
    def request(self) -> Request:
        """Request of the plan, with layer partition, recompute and offload settled."""
        return self.plan.request

    @property
    def schedule(self) -> Schedule:
        """Order of the passes."""
        return self.plan.schedule

    @property
    def layers(self) -> tuple[int, ...]:
        """Decoder layers of each stage."""
        placement = self.schedule.placement
        return self.request.layers_on(placement) or layers_by_stage(self.spec.layers, placement.stages)

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        """Program of each rank, proved to end."""
        return proved(self.schedule, self.plan.costs)

    @property
    def messages(self) -> tuple[int, ...]:
        """Largest number of messages that each rank holds."""
        return tuple(program.messages_held for program in self.programs)

    @cached_property
    def memory(self) -> tuple[RankMemory, ...]:
        """Memory of each rank; empty if bytes are unknown."""
        model, request = self.spec.trained, self.request
        if model is None or request.costs.in_bytes is None:
            return ()
        return rank_memory(model, self.schedule, self.plan.costs, request.costs, self.layers, self.messages)

    @property
    def worst(self) -> int:
        """Rank with the highest device memory."""
        return max(range(len(self.memory)), key=lambda rank: self.memory[rank].device)

    def fits(self, device: float) -> bool:
        """Returns whether the plan leaves the reserve of a device with this many bytes free; its bytes are known."""
        return self.memory[self.worst].device <= usable(device)

    @property
    def assumed(self) -> str:
        """Describes the costs, and what is recomputed and offloaded, in one line."""
        said = assumed(self.spec, self.request.costs, self.request.decisions.layers)
        return said + _savings(self.request.decisions, _host_bytes(self))


def plan_job(spec: JobSpec, machine: Machine = ANY, make: Make = make_plan) -> JobPlan:
    """Plans a job, after :func:`.checks.validate` has accepted it.

    ``auto`` may partition the layers, recompute, and offload where copies are measured, if no flag decides that.
    Megatron's own recompute in its flags then means that memory was short: the plan takes as much recompute as the
    memory needs. Gradients stay bitwise equal.

    Args:
        spec: the job, with its model, CSV and cost file.
        machine: what the plan has to keep within.
        make: makes each plan.

    Raises:
        PlanError: a flag is wrong, or nothing fits; the error names the flag.
    """
    spec = _on(machine, spec)
    _check_linears(spec, machine)
    if spec.settings.schedule.name != AUTO:
        job = _planned(spec, machine, make)
        return replace(job, left_out=_could_go(job, machine, make))
    free = without_recompute(spec)
    try:
        return _chosen(spec, machine, make) if free is None else _freed(spec, free, machine, make)
    except ShortMemoryError as error:
        return _of_least_memory([spec] if free is None else [free, spec], machine, make, error)


def _freed(spec: JobSpec, free: JobSpec, machine: Machine, make: Make) -> JobPlan:
    """Returns the shorter plan with or without Megatron's own recompute: ``free`` is the job without it."""
    try:
        job = _chosen(free, machine, make)
    except PlanError:
        return _chosen(spec, machine, make)
    kept_work = _least_time(spec, machine)
    if job.plan.iteration_time > kept_work:
        with suppress(PlanError):
            kept = _chosen(spec, machine, make)
            if kept.plan.iteration_time <= job.plan.iteration_time:
                return kept
    return replace(job, left_out=_left_out(spec, job, kept_work, machine))


def check_fits(job: JobPlan) -> None:
    """Refuses a plan of ``auto`` that needs more memory than its devices have."""
    if job.too_much:
        least = job.memory[job.worst].device
        raise PlanError(
            f"{job.spec.flags['schedule']} {AUTO}: nothing fits: of all schedules {job.schedule.name} needs least, "
            f"{amount(least)}, {amount(job.too_much)} more than {percent(1 - RESERVED)} of a device; use more GPUs"
        )


def check_requests(spec: JobSpec, machine: Machine = ANY) -> None:
    """Checks that ``adaptive`` or ``auto`` has something to search, without the search.

    Raises:
        PlanError: as :func:`plan_job`.
    """
    spec = _on(machine, spec)
    _check_linears(spec, machine)
    refused: list[PlanError] = []
    for choice in auto_choices(spec) if spec.settings.schedule.name == AUTO else [spec]:
        try:
            request = _limited(choice, machine).request
            if request.memory_limit is not None:
                limit_in_microbatches(request)
        except ShortMemoryError as error:
            if spec.settings.schedule.name == AUTO and _is_in_bytes(choice, machine):
                return  # it then plans for the least memory
            refused.append(error)
        except PlanError as error:
            refused.append(error)
        else:
            return
    raise refused[0]


def _on(machine: Machine, spec: JobSpec) -> JobSpec:
    """Returns the job with the GPU that it runs on."""
    return replace(spec, gpu=machine.gpu) if machine.gpu else spec


def _check_linears(spec: JobSpec, machine: Machine) -> None:
    """Refuses a search for schedules that cannot split the linears."""
    schedule = spec.settings.schedule
    if schedule.is_searched and (fault := unsplittable(spec, machine)):
        raise PlanError(f"{spec.flags['schedule']} {schedule.name} {fault}")


def _chosen(spec: JobSpec, machine: Machine, make: Make) -> JobPlan:
    """Returns the plan of the first choice of ``auto`` that works."""
    refused: list[PlanError] = []
    for choice in auto_choices(spec):
        try:
            return _or_unplaced(_planned(choice, machine, make), spec, machine, make)
        except PlanError as error:
            refused.append(error)
    raise next((error for error in refused if isinstance(error, ShortMemoryError)), refused[0])


def _of_least_memory(specs: Sequence[JobSpec], machine: Machine, make: Make, refused: PlanError) -> JobPlan:
    """Returns the shortest plan that fits of those with least memory; where none does, the one that needs least.

    Args:
        specs: the job without Megatron's own recompute if it can go, and as the flags say.
        machine: what the plan has to keep within.
        make: makes each plan.
        refused: why ``auto`` has no other plan.

    Raises:
        PlanError: with a limit that no plan keeps within, or if it is not one of bytes.
    """
    spec, jobs = specs[-1], list[JobPlan]()
    device, limit = _device(spec, machine), spec.settings.memory_limit
    if not _is_in_bytes(spec, machine):
        raise refused
    for kept in specs:
        choice = next((choice for choice in auto_choices(kept) if choice.settings.saving != MemorySaving()), kept)
        saving = replace(kept, settings=replace(choice.settings, layers=kept.settings.layers))

        def fits(plan: Plan, saving: JobSpec = saving) -> bool:
            job = JobPlan(saving, plan)
            with suppress(PlanError):
                jobs.append(_accepted(job, machine))
            return _fits(job, machine)

        try_least(saving, make, fits)
    jobs = [job for job in jobs if job.memory]
    if fitting := [job for job in jobs if _fits(job, machine)]:
        return min(fitting, key=lambda job: job.plan.iteration_time)
    if not jobs:
        raise refused
    if device is None:
        assert limit is not None, "it is one of bytes"
        raise too_small(spec, limit, min(map(_held, jobs)))
    least = min(jobs, key=lambda job: job.memory[job.worst].device)
    return replace(least, too_much=least.memory[least.worst].device - usable(device))


def _device(spec: JobSpec, machine: Machine) -> float | None:
    """Memory of the device that a plan has to keep within, bytes; None if it is unknown, or the user gives a limit.

    In training a limit to measure begins low, since the job asks the devices themselves. A dry run assumes one.
    """
    limit = spec.settings.memory_limit
    by_itself = spec.settings.schedule.name == AUTO and limit is None
    assumed = spec.settings.dry_run is not None and limit is not None and limit.is_measured
    return machine.device if by_itself or assumed else None


def _is_in_bytes(spec: JobSpec, machine: Machine) -> bool:
    """Returns true if memory of the model is compared in bytes: with a device, or with a limit that is no fraction."""
    limit = spec.settings.memory_limit
    in_bytes = _device(spec, machine) is not None or (limit is not None and limit.size is not None)
    return spec.trained is not None and in_bytes


def _or_unplaced(job: JobPlan, spec: JobSpec, machine: Machine, make: Make) -> JobPlan:
    """Returns the plan, or one with the layers of the flags in ``spec`` if memory is short and that is shorter.

    Where layers are partitioned, a limit of activations leaves room for the parameters that move with them.
    """
    moved = job.spec.settings.layers != spec.settings.layers
    if spec.settings.memory_limit is None or not moved or not any(job.plan.decisions.mean_savings.values()):
        return job
    with suppress(PlanError):
        settings = replace(job.spec.settings, layers=spec.settings.layers, search_seconds=job.request.search_seconds)
        other = _planned(replace(spec, settings=settings), machine, make)
        if other.plan.iteration_time < job.plan.iteration_time:
            return other
    return job


def _planned(spec: JobSpec, machine: Machine, make: Make) -> JobPlan:
    name, limited = spec.settings.schedule.name, _limited(spec, machine)
    job = _made_within(spec, limited, machine, make)
    if name == AUTO and limited.limit is not None and limited.limit.size is not None:
        job = _or_fitting_by_name(job, machine)
    return _accepted(job, machine)


def _accepted(job: JobPlan, machine: Machine) -> JobPlan:
    """Returns the plan if its host has room for it and Megatron's flags work with it; raises PlanError otherwise."""
    _check_host(job, machine)
    spec = job.spec
    why = refusal(spec, job.schedule, machine) if spec.by_megatron else ""
    if not why and not machine.logs_unequal:
        why = unlogged(spec, job.schedule.placement, job.layers)
    if why:
        raise PlanError(f"{spec.flags['schedule']} {spec.settings.schedule.name} {why}")
    return job


def _fits(job: JobPlan, machine: Machine) -> bool:
    """Returns whether a plan keeps within its device, or else its limit in GiB, with the messages it holds."""
    device, limit = _device(job.spec, machine), job.spec.settings.memory_limit
    if not job.memory:
        return False
    if device is not None:
        return job.fits(device)
    return limit is not None and limit.size is not None and _held(job) <= limit.size


def _held(job: JobPlan) -> float:
    """Bytes of activations and messages on the rank that holds most."""
    return max(rank.activations + rank.messages for rank in job.memory)


def _limited(spec: JobSpec, machine: Machine) -> LimitedRequest:
    """Returns the planning request within the device or the user's limit."""
    return request_of(spec, _device(spec, machine))


def _made_within(spec: JobSpec, limited: LimitedRequest, machine: Machine, make: Make) -> JobPlan:
    """Returns the plan. With a limit in GiB, the plan leaves memory for what its ranks hold beside activations."""
    room, job, model = MESSAGES, JobPlan(spec, make(limited.request)), spec.trained
    while limited.limit is not None and limited.limit.size is not None and model is not None:
        held = max(hidden_states(model, job.schedule, job.messages))
        if held <= room or _fits(job, machine):
            break
        if job.request.schedule == "adaptive":
            plan, settled = job.plan, make(limited.within(job.request, held))
            job = JobPlan(spec, or_named(replace(settled, asked=plan.asked, named=plan.named)))
        else:
            job = JobPlan(spec, make(limited.within(limited.request, held)))
        room = held
    return job


def _or_fitting_by_name(job: JobPlan, machine: Machine) -> JobPlan:
    """Returns the plan, or the shortest schedule by name that is shorter and fits with the messages that it holds."""
    for line in sorted(job.plan.named, key=lambda line: line.makespan):
        if line.makespan >= job.plan.iteration_time:
            break
        if _fits(named := replace(job, plan=by_name(job.plan, line)), machine):
            return named
    return job


def _least_time(spec: JobSpec, machine: Machine) -> float:
    """Computing time of an average rank, in the unit of the costs: no plan of the job is shorter."""
    request = request_of(spec.under("1f1b"), machine.device).request
    return make_plan(replace(request, partition=False)).timeline.ideal


def _left_out(spec: JobSpec, job: JobPlan, kept_work: float, machine: Machine) -> str:
    """Says what the plan makes of Megatron's own recompute, which computes for ``kept_work``."""
    share = job.request.decisions.mean_savings.get("recomputed", 0.0)
    saved = 1 - job.plan.timeline.ideal / kept_work
    instead = f", and {percent(share)} of the layers are recomputed instead" if share else ""
    return f"recompute left out ({_recompute_flag(spec)}{instead}): {_saved(saved)}{_free(job, machine)}"


def _could_go(job: JobPlan, machine: Machine, make: Make) -> str:
    """Says if a job with a schedule by name would fit its devices without Megatron's own recompute."""
    free, device = without_recompute(job.spec), machine.device
    if free is None or device is None or job.request.schedule == "adaptive":  # a search is too long for a hint
        return ""
    try:
        other = _planned(free, machine, make)
    except PlanError:
        return ""
    if not other.memory or not other.fits(device):
        return ""
    saved = 1 - other.plan.timeline.ideal / job.plan.timeline.ideal
    return f"{_recompute_flag(job.spec)} can be left out: {_saved(saved)}{_free(other, machine)}"


def _recompute_flag(spec: JobSpec) -> str:
    return f"--recompute-granularity {spec.recompute.granularity}"


def _saved(share: float) -> str:
    return f"{percent(share)} less computing"


def _free(job: JobPlan, machine: Machine) -> str:
    if machine.device is None or not job.memory:
        return ""
    return f", and {amount(machine.device - job.memory[job.worst].device)} stay free"


def _host_bytes(job: JobPlan) -> float:
    """Host memory for the offloaded activations of the rank that has most, bytes; 0 if it is not known."""
    memory, ranks = job.request.costs.in_bytes, job.request.ranks
    return 0.0 if memory is None else max(taken(job.schedule, job.plan.costs)) * memory.of_rank(ranks)


def _check_host(job: JobPlan, machine: Machine) -> None:
    """Refuses a plan if the host has too little memory for all its ranks."""
    flags = job.spec.flags
    if machine.host is None:
        return
    needed, here = _host_bytes(job), machine.ranks_on_host
    if needed * here > machine.host:
        raise PlanError(
            f"{flags['offload']} takes {needed / _GIB:.1f} GiB of host memory for each of {here} ranks, and this host "
            f"has {machine.host / _GIB:.1f} GiB left: raise {flags['memory_limit']}, or leave the flag out"
        )


def _savings(decisions: Decisions, host_bytes: float) -> str:
    """Describes recompute and offload of a job in one line."""
    host = f", {host_bytes / _GIB:.2f} GiB of each rank's at most on the host" if host_bytes else ""
    said = {"recomputed": "% of the layers recomputed", "offloaded": f"% of the layers' activations offloaded{host}"}
    return "".join(f"; {100 * share:.0f} {said[name]}" for name, share in decisions.mean_savings.items())
