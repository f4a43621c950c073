"""Plans and programs for the numbers of microbatches of a training run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from megatron.schedules.planner.adaptive import limit_in_microbatches
from megatron.schedules.planner.forward_only import forward_only as all_forwards
from megatron.schedules.planner.microbatch_lengths import LengthsPlanner
from megatron.schedules.planner.request import Request
from megatron.schedules.planner.whole_backwards import references
from megatron.schedules.programs.checker import proved
from megatron.schedules.programs.program import Program
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import Timeline, simulate


class Planner:
    """Makes the plan and the programs for each number of microbatches once.

    Args:
        request: request of the first plan, with its decisions settled.
        schedule: the first plan, for the number of microbatches in the flags.
        programs: its programs, proved to end.
        make: makes the other plans.
    """

    def __init__(
        self, request: Request, schedule: Schedule, programs: tuple[Program, ...], make: Callable[[Request], Schedule]
    ) -> None:
        # The number of microbatches may change during a run, the position of its stages may not.
        self._request, self._make = replace(request, placement=schedule.placement), make
        self._schedules = {schedule.microbatches: schedule}
        self._programs: dict[tuple[int, bool, int], Program] = {}
        self._timelines: dict[int, Timeline] = {}
        self._microbatches = schedule.microbatches  # of the last training call
        self.first = schedule
        self._first_programs = programs
        self.messages = tuple(program.messages_held for program in self._first_programs)  # maximum, by rank

    @property
    def placement(self) -> Placement:
        """Position of the stages, the same for every number of microbatches."""
        return self.first.placement

    @property
    def costs(self) -> Costs:
        """Costs used for planning."""
        return self._request.costs

    @property
    def decisions(self) -> Decisions:
        """Layer partition, recompute and offload."""
        return self._request.decisions

    def peak_bytes(self, timeline: Timeline) -> float | None:
        """Peak activation memory of the worst rank in ``timeline``, bytes; None if the model's sizes are unknown."""
        return self._request.peak_bytes(timeline)

    def schedule(self, num_microbatches: int) -> Schedule:
        """Schedule of all ranks for ``num_microbatches`` in training."""
        if num_microbatches not in self._schedules:
            self._schedules[num_microbatches] = self._make(replace(self._request, microbatches=num_microbatches))
        return self._schedules[num_microbatches]

    @property
    def last_stage_rank(self) -> int:
        """Pipeline rank with the output layer."""
        return self.placement.rank_of[-1]

    @property
    def shares_vocabulary(self) -> bool:
        """True if each rank has a part of the embedding and of the output layer (vocabulary parallelism)."""
        return self._request.costs.model.shared_vocabulary

    @cached_property
    def layers_offloaded(self) -> tuple[int, ...] | None:
        """Number of each stage's first decoder layers whose activations are offloaded; None for all."""
        return self._layers_of(self._request.decisions.offloaded)

    @property
    def offloaded_bytes(self) -> list[list[float]] | None:
        """Bytes of each offloaded layer of each stage, for one microbatch; None if the model's sizes are unknown."""
        memory, counts = self._request.costs.in_bytes, self._request.layers_on(self.placement)
        if memory is None or counts is None:
            return None
        first = self.layers_offloaded or counts
        return [sizes[:number] for sizes, number in zip(memory.by_layer(counts), first, strict=True)]

    @cached_property
    def recomputed_layers(self) -> tuple[range, ...] | None:
        """Decoder layers of each stage that R recomputes, which follow the offloaded layers; None for all."""
        recomputed = self._layers_of(self._request.decisions.recomputed)
        offloaded = self.layers_offloaded or (0,) * self.placement.stages
        if recomputed is None:
            return None
        return tuple(range(first, first + count) for first, count in zip(offloaded, recomputed, strict=True))

    def _layers_of(self, shares: tuple[float, ...] | None) -> tuple[int, ...] | None:
        counts = self._request.layers_on(self.placement)
        if shares is None or counts is None:
            return None
        return tuple(round(share * count) for share, count in zip(shares, counts, strict=True))

    @property
    def timeline(self) -> Timeline:
        """Timeline of the first plan, with its costs."""
        return self.timeline_of(self.first.microbatches)

    def timeline_of(self, num_microbatches: int) -> Timeline:
        """Timeline of the plan for ``num_microbatches``, with its costs."""
        if num_microbatches not in self._timelines:
            schedule = self.schedule(num_microbatches)
            self._timelines[num_microbatches] = simulate(schedule, self._request.costs_on(self.placement))
        return self._timelines[num_microbatches]

    def program(self, num_microbatches: int, rank: int, *, forward_only: bool) -> Program:
        """Program of ``rank`` for ``num_microbatches``. It is planned, lowered and checked on the first call."""
        key = num_microbatches, forward_only, rank
        if not forward_only:
            self._microbatches = num_microbatches
        if key not in self._programs:
            programs, self._first_programs = self._first_programs, ()  # programs of other ranks are freed
            if forward_only or num_microbatches != self.first.microbatches or not programs:
                programs = self._proved(num_microbatches, forward_only=forward_only)
            self._programs[key] = programs[rank]
        return self._programs[key]

    @property
    def request(self) -> Request:
        """Request for the job's current number of microbatches."""
        return replace(self._request, microbatches=self._microbatches)

    @property
    def running(self) -> Schedule:
        """Plan for the job's current number of microbatches."""
        return self.schedule(self._microbatches)

    def prove(self, request: Request, schedule: Schedule) -> tuple[Program, ...]:
        """Programs of all ranks for another plan with the same placement, lowered for the costs of ``request``.

        Raises:
            ProgramError: the programs would not finish.
        """
        return proved(schedule, request.costs_on(self.placement))

    def adopt(self, request: Request, schedule: Schedule, proved: tuple[Program, ...]) -> None:
        """Trains with ``schedule`` from now on. Plans for other numbers of microbatches use the costs of ``request``.

        Evaluation programs do not change, because they have no backwards.
        """
        self._request = replace(request, placement=self.placement)
        self._schedules, self._timelines = {schedule.microbatches: schedule}, {}
        self._programs = {key: program for key, program in self._programs.items() if key[1]}
        self.first, self._first_programs = schedule, proved

    def references(self, timeline: Timeline, rank: int) -> tuple[Program, ...]:
        """Programs of ``rank`` for the plan of ``timeline`` with whole backwards, see :func:`.references`."""
        return tuple(proved(schedule, timeline.costs)[rank] for schedule in references(timeline.schedule))

    def for_lengths(self, num_microbatches: int, attention: tuple[float, float]) -> LengthsPlanner:
        """Returns the planner for iterations whose microbatches differ in length.

        Args:
            num_microbatches: n.
            attention: attention's shares of F and I.
        """
        request = self._request
        limit = limit_in_microbatches(request) if request.schedule == "adaptive" else None
        base = self.schedule(num_microbatches)
        costs = replace(request.costs, layers=replace(request.costs.layers, attention=attention))
        return LengthsPlanner(base, costs, limit, request.decisions)

    def _proved(self, num_microbatches: int, *, forward_only: bool) -> tuple[Program, ...]:
        request = self._request
        if not forward_only:
            schedule = self.schedule(num_microbatches)
        else:
            schedule = all_forwards(self.placement, num_microbatches, request.costs, request.decisions)
        return proved(schedule, request.costs_on(self.placement))
