"""Ranks take a new plan over at the same boundary, or none of them does; whatever goes wrong, the job goes on."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.uneven_layers import uneven
from megatron.schedules.planner.background import BackgroundPlanError
from megatron.schedules.planner.registry import plan
from megatron.schedules.planner.replanning import Proposal, propose
from megatron.schedules.planner.request import Request
from megatron.schedules.programs.checker import check
from megatron.schedules.programs.lowering import lower
from megatron.schedules.runtime import replanner
from megatron.schedules.runtime.control_messages import ControlMessages
from megatron.schedules.runtime.replanner import Replanner
from megatron.schedules.schedule.cost_parts import LayerTimes
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.utils.errors import PlanError
from tests.waiting import HANGS_S

RANKS = 3
ASKED = Request("adaptive", RANKS, 6, memory_limit=1, search_seconds=0.02, chunk_choices=(2,))
MEASURED = replace(ASKED, costs=uneven(Costs.of(1, 2, 0.5, 0.4), (1, 1, 2, 1, 1, 1)))
FIRST = plan(ASKED)


class Store:
    """That of one process."""

    def __init__(self) -> None:
        self._texts: dict[str, bytes] = {}
        self._new = threading.Condition()

    def set(self, name: str, text: str) -> None:
        with self._new:
            assert name not in self._texts, "ranks may read what is posted at any time"
            self._texts[name] = text.encode()
            self._new.notify_all()

    def get(self, name: str) -> bytes:
        with self._new:
            assert self._new.wait_for(lambda: name in self._texts, timeout=HANGS_S), f"nobody posts {name}"
            return self._texts[name]


class Here:
    """Plans in this process, and is done at the second look."""

    def __init__(self, request: Request, current: Schedule, seconds: float) -> None:
        self._asked, self._looks = (request, current), 0

    def poll(self) -> Proposal | None:
        self._looks += 1
        if self._looks < 2:
            return None
        try:
            return propose(*self._asked)
        except PlanError as error:
            raise BackgroundPlanError(str(error)) from None

    def close(self) -> None: ...


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is started."""
    monkeypatch.setattr(replanner, "BackgroundPlan", Here)


class Plans:
    """Those of one rank; ``wrong`` is raised where it proves programs."""

    def __init__(self, wrong: Exception | None = None) -> None:
        self.running, self.wrong = FIRST, wrong
        self.adopted: Any = None

    def prove(self, request: Request, schedule: Schedule) -> Any:
        if self.wrong is not None:
            raise self.wrong
        programs = lower(schedule, request.costs.on(schedule.placement))
        check(programs)
        return programs

    def adopt(self, request: Request, schedule: Schedule, proved: Any) -> None:
        self.running, self.adopted = schedule, proved


class Job:
    """Ranks as threads, which go through iterations together, the last one late."""

    def __init__(self, plans: list[Plans]) -> None:
        self.plans, self._store, self._said = plans, Store(), [[] for _ in plans]  # type: ignore[var-annotated]
        self._answers, self._meet = [""] * len(plans), threading.Barrier(len(plans), timeout=HANGS_S)
        self.ran: list[list[Schedule]] = [[] for _ in plans]

    def run(self, requests: dict[int, list[Request]], iterations: int = 1_000_000, late: int = 2) -> list[list[str]]:
        """What each rank said; at each iteration in ``requests`` they ask for those, and stop once all are answered."""
        threads = [threading.Thread(target=self._rank, args=(r, requests, iterations, r == late)) for r in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self._said

    def _rank(self, rank: int, requests: dict[int, list[Request]], iterations: int, late: bool) -> None:
        def exchange(text: str) -> list[str]:
            self._answers[rank] = text
            self._meet.wait()
            found = self._answers[:]
            self._meet.wait()
            return found

        plans = self.plans[rank]
        ours = Replanner(
            plans,
            ControlMessages(self._store, "replan"),
            first=rank == 0,
            say=self._said[rank].append,
            exchange=exchange,
        )
        for iteration in range(iterations):
            self._meet.wait()
            if late:
                time.sleep(0.005)
            ours.boundary()
            for request in requests.get(iteration, []):
                ours.start(request)
            self.ran[rank].append(plans.running)
            if not ours.under_way and iteration > max(requests):
                return
            time.sleep(0.01)
        ours.close()


def job(*wrong: Exception | None) -> Job:
    return Job([Plans(each) for each in wrong or (None,) * RANKS])


def test_all_ranks_switch_at_the_same_boundary_and_say_what_they_expect() -> None:
    ranks = job()
    said = ranks.run({2: [MEASURED]})
    expected = propose(MEASURED, FIRST)
    assert said[0] == said[1] == said[2]
    assert len(said[0]) == 1
    before, after = expected.before, expected.after
    assert said[0][0].startswith(
        f"replanned: iteration {before.makespan:.1f} -> {after.makespan:.1f} ms expected, bubble "
        f"{100 * before.bubble:.1f} -> {100 * after.bubble:.1f} %; "
    )
    assert "within 1 of 1F1B's memory" in said[0][0]
    assert ranks.ran[0] == ranks.ran[1] == ranks.ran[2]
    assert ranks.ran[0][0] == FIRST != ranks.ran[0][-1]
    assert [plans.adopted for plans in ranks.plans] == [ranks.plans[0].adopted] * RANKS


@pytest.mark.usefixtures("here")
def test_where_nothing_is_better_all_go_on() -> None:
    ranks = job()
    said = ranks.run({0: [replace(ASKED, costs=ASKED.costs)]})
    assert said[0] == said[1] == said[2]
    assert said[0][0].startswith("replanned: nothing better was found; iteration ")
    assert [plans.running for plans in ranks.plans] == [FIRST] * RANKS


@pytest.mark.usefixtures("here")
def test_a_rank_that_cannot_prove_its_programs_keeps_all_from_switching() -> None:
    ranks = job(None, ValueError("no such\nluck"), None)
    said = ranks.run({0: [MEASURED]})
    assert said[0] == said[1] == said[2]
    assert said[0] == [
        "WARNING: a new plan is not adopted, and the current one stays: rank 1: ValueError: no such luck"
    ]
    assert [plans.running for plans in ranks.plans] == [FIRST] * RANKS


@pytest.mark.usefixtures("here")
def test_ranks_that_measured_different_costs_do_not_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = job()
    stock = replanner.digest
    other = (replace(MEASURED, costs=costs) for costs in (Costs(), Costs(LayerTimes(2)), Costs()))
    monkeypatch.setattr(replanner, "digest", lambda csv, placement, _: stock(csv, placement, next(other)))
    said = ranks.run({0: [MEASURED]})
    assert "has another plan than rank 0" in said[0][0]
    assert [plans.running for plans in ranks.plans] == [FIRST] * RANKS


@pytest.mark.usefixtures("here")
def test_where_no_plan_is_found_all_go_on_with_a_warning() -> None:
    ranks = job()
    said = ranks.run({0: [replace(MEASURED, memory_limit=0.01)]})
    assert said[0] == said[1] == said[2]
    assert said[0][0].startswith("WARNING: replanning failed, and the current plan stays: a memory limit of 0.01")


def test_where_no_process_starts_all_go_on_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: Any) -> None:
        raise OSError("out of processes")

    monkeypatch.setattr(replanner, "BackgroundPlan", refuses)
    said = job().run({0: [MEASURED]})
    assert said[2] == ["WARNING: replanning failed, and the current plan stays: no process can be started to plan: "
                       "out of processes"]  # fmt: skip


def test_a_second_request_replaces_the_first() -> None:
    ranks = job()
    endless = replace(MEASURED, search_seconds=1000.0)
    said = ranks.run({0: [endless], 3: [MEASURED]})
    assert [len(each) for each in said] == [1] * RANKS
    assert said[0][0].startswith("replanned: iteration ")


def test_the_processes_that_plan_end_with_the_job() -> None:
    begun: list[Any] = []
    stock: Callable[..., Any] = replanner.BackgroundPlan

    def noted(*args: Any) -> Any:
        begun.append(stock(*args))
        return begun[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replanner, "BackgroundPlan", noted)
        job().run({0: [replace(MEASURED, search_seconds=1000.0)]}, iterations=5)
    assert [each._process.poll() is None for each in begun] == [False]
    assert json.loads(propose(ASKED, FIRST).to_text())["csv"] == ""
