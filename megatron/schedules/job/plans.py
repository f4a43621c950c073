"""Plans of jobs that are described without Megatron, by the command line's flags or from Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from megatron.schedules.estimate.device_memory import RankMemory
from megatron.schedules.job import values
from megatron.schedules.job.memory_limit import with_memory_limit
from megatron.schedules.job.pipelined_model import PipelinedModel
from megatron.schedules.job.spec import JobSpec
from megatron.schedules.measure.cost_profile import read_costs
from megatron.schedules.measure.custom_costs import CustomCosts
from megatron.schedules.measure.profile_facts import CopyRates, Profile, copy_time
from megatron.schedules.planner.adaptive import FINER_CHUNKS, chunk_choices, wants_finer_chunks
from megatron.schedules.planner.registry import AUTO, Request, stages
from megatron.schedules.planner.service import Plan, make_plan
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.progress import Progress, unheard


class _Measured(NamedTuple):
    """Costs as far as they are given.

    Args:
        costs: before what other settings say.
        profile: the measured file.
        custom: the file written by hand.
    """

    costs: Costs
    profile: Profile | None = None
    custom: CustomCosts | None = None


class JobPlans:
    """Jobs that differ in their schedule alone, and their plans.

    Args:
        specs: one or more; sizes and microbatches are known.
        model: a model's name, or a file of Megatron's flags; None for equal stages.
        flags: how the user writes each part of a request, see :meth:`.PlanError.told`; and ``model``.

    Raises:
        PlanError: naming the flag that is wrong.
    """

    def __init__(self, specs: Sequence[JobSpec], model: str | None, flags: Mapping[str, str]) -> None:
        settings, self._flags = specs[0].settings, flags
        self.ranks, self.microbatches = specs[0].sizes.pipeline, specs[0].microbatches or 1
        self._settings, self._limit = settings, settings.memory_limit
        shared = settings.vocabulary_parallel
        self.model = None if model is None else PipelinedModel(model, self.ranks, self.microbatches, shared=shared)
        self._measured = self._read()
        self.is_measured = self._measured.profile is not None
        known = self._measured.costs.model is not None or self.model is not None
        for part, is_given, what in (
            ("layers", settings.layers != "even", "a layer"),
            ("shared_vocabulary", settings.vocabulary_parallel, "its output layer"),
        ):
            if is_given and not known:
                raise PlanError(
                    f"{flags[part]} goes with {flags['model']}, or a profile with the model's ends: what does {what} "
                    "cost?"
                )
        custom = self._measured.custom
        # Shares of memory that are given go before the model's bytes.
        self.instead_of_bytes = [] if custom is None else [f"{flags['costs']} $.{name}" for name in custom.of_memory]
        self.costs = self._costs(self.ranks)
        if self._limit is not None and self._limit.is_measured:
            raise PlanError(
                f"{flags['memory_limit']} {self._limit.text} is for training, which measures it: give 0.5 or 20GiB"
            )

    @property
    def knows_bytes(self) -> bool:
        """Whether memory is known in bytes."""
        return self.model is not None and not self.instead_of_bytes

    def request(self, spec: JobSpec) -> Request:
        """What ``spec`` asks of the planner."""
        found = self._request(spec, spec.settings.schedule.chunks)
        if spec.settings.schedule.chunks is None and wants_finer_chunks(found):
            with suppress(PlanError):  # too few layers
                return self._request(spec, FINER_CHUNKS)
        return found

    def _request(self, spec: JobSpec, most: int | None) -> Request:
        """The same with ``most`` chunks a rank; as many as usual without it."""
        settings, choice = spec.settings, spec.settings.schedule
        asked = Request(
            choice.name,
            self.ranks,
            self.microbatches,
            csv=spec.csv,
            decisions=Decisions(layers=settings.layers if isinstance(settings.layers, tuple) else None),
            partition=settings.layers == "auto",
        )
        if choice.name == AUTO and self.costs.model is not None and settings.layers == "even":
            asked = replace(asked, partition=True)
        if choice.name not in ("adaptive", AUTO):
            asked = asked if choice.chunks is None else replace(asked, chunks=choice.chunks)
            return replace(asked, costs=self._costs(stages(asked)))
        asked = replace(
            asked,
            chunk_choices=chunk_choices(most or max(asked.chunk_choices)),
            search_seconds=settings.search_seconds,
            recompute=settings.saving.recompute,
            offload=settings.saving.offload,
        )
        return self._limited(replace(asked, costs=self._costs(stages(asked))))

    def plan(self, spec: JobSpec, progress: Progress = unheard) -> Plan:
        """The plan for ``spec``."""
        return make_plan(self.request(spec), progress)

    def memory(self, plan: Plan) -> tuple[RankMemory, ...]:
        """What each rank holds in ``plan``; nothing where that is not known in bytes."""
        return self.model.ranks(plan) if self.model is not None and self.knows_bytes else ()

    def _limited(self, asked: Request) -> Request:
        if self._limit is None:
            return asked
        size, held = self._limit.size, self._rank_bytes(asked.costs)
        if size is not None and held is None:
            raise PlanError(
                f"{self._flags['memory_limit']} {self._limit.text} needs {self._flags['model']} or a profile in "
                f"{self._flags['costs']} that counted bytes: give one of these, or a fraction such as 0.5"
            )
        if self.model is not None or size is None or held is None:
            message = 0.0 if self.model is None else self.model.message_bytes
            return with_memory_limit(self._flags["memory_limit"], self._limit, asked, message)
        return replace(asked, memory_limit=size / (held * self.ranks))

    def _costs(self, number: int) -> Costs:
        """What a plan of so many stages is made for."""
        found, profile, custom = self._measured
        if self.model is not None:
            found = self.model.costs(found, number, profile, placed=self._settings.layers == "auto")
        found = replace(found, shared_vocabulary=self._settings.vocabulary_parallel)
        if self.instead_of_bytes:
            found = replace(found, memory=None)
        return self._with_copies(found if custom is None else custom.added_to(found))

    def _with_copies(self, costs: Costs) -> Costs:
        """``costs`` with the time of a copy, which offloading needs."""
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
        """Activations of a microbatch in an average rank's layers, in bytes."""
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


def under(spec: JobSpec, name: str) -> JobSpec:
    """``spec`` under another schedule, without what that does not have."""
    settings = replace(
        spec.settings, schedule=values.ScheduleChoice(name, name), memory_limit=None, saving=values.MemorySaving()
    )
    return replace(spec, settings=settings, csv=None)
