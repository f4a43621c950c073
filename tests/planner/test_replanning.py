"""Planning again: for costs that were measured, on the same placement, in a background process; never for the worse."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.uneven_layers import uneven
from megatron.schedules.planner import background
from megatron.schedules.planner.background import BackgroundPlan, BackgroundPlanError
from megatron.schedules.planner.registry import plan
from megatron.schedules.planner.replanning import Proposal, digest, moved, propose, read_rows
from megatron.schedules.planner.request import Request
from megatron.schedules.schedule.cost_parts import Link
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.simulator import simulate
from megatron.schedules.schedule.text_forms import to_csv
from megatron.schedules.utils.errors import PlanError
from tests.waiting import HANGS_S, until

ADAPTIVE = Request("adaptive", 4, 8, memory_limit=0.75, search_seconds=0.05, chunk_choices=(2,))
EQUAL = Costs.of(1, 2.2, 0.5, 0.3)
MEASURED = uneven(EQUAL, (1, 1, 1.6, 1, 1, 1.6, 1, 1))


@pytest.mark.parametrize(
    "request_", [ADAPTIVE, Request("v-half", 4, 8), Request("zb-1p", 4, 8)], ids=lambda r: r.schedule
)
def test_a_plan_for_measured_costs_is_shorter_under_them_than_the_one_for_assumed_costs(request_: Request) -> None:
    current = plan(request_)
    costs = MEASURED if current.placement.chunks == 2 else uneven(EQUAL, (1, 1, 1.6, 1))
    found = propose(replace(request_, costs=costs), current)
    assert found.before.makespan == simulate(current, costs.on(current.placement)).makespan
    assert found.csv and found.after.makespan < 0.995 * found.before.makespan
    schedule = read_rows(found.csv, current)
    assert schedule.placement == current.placement
    after = simulate(schedule, costs.on(schedule.placement))
    assert (after.makespan, after.bubble) == found.after
    assert 0 < moved(current, schedule) <= sum(map(len, current.order))
    assert moved(current, current) == 0
    assert Proposal.from_text(found.to_text()) == found


def test_a_slow_link_is_worked_round() -> None:
    current = plan(ADAPTIVE)
    costs = replace(ADAPTIVE.costs, link=Link(0.05, ((1, 2, 3.0), (2, 1, 3.0))))
    found = propose(replace(ADAPTIVE, costs=costs), current)
    assert found.csv and found.after.makespan < 0.98 * found.before.makespan


def test_a_plan_that_is_right_already_stays() -> None:
    request = replace(ADAPTIVE, costs=MEASURED)
    found = propose(request, plan(request))
    assert found.csv == "" and found.after == found.before


def test_a_plan_that_holds_too_much_goes_even_for_a_longer_one() -> None:
    request = replace(ADAPTIVE, costs=MEASURED)
    current = plan(request)
    found = propose(replace(request, memory_limit=0.4), current)
    assert found.after.makespan > found.before.makespan
    assert simulate(read_rows(found.csv, current), MEASURED.on(current.placement)).peak <= 0.4 * 4


def test_rows_that_are_no_plan_on_this_placement_are_refused() -> None:
    current = plan(ADAPTIVE)
    for csv in (to_csv(plan(Request("v-half", 4, 7))), to_csv(plan(Request("zb-1p", 4, 8)))):
        with pytest.raises(PlanError):
            read_rows(csv, current)


def test_a_digest_tells_rows_placements_costs_and_decisions_apart() -> None:
    current = plan(ADAPTIVE)
    csv, other = to_csv(current), plan(Request("zb-1p", 4, 8)).placement
    marks = {
        digest(csv, current.placement, ADAPTIVE),
        digest(csv + "x", current.placement, ADAPTIVE),
        digest(csv, other, ADAPTIVE),
        digest(csv, current.placement, replace(ADAPTIVE, costs=MEASURED)),
        digest(csv, current.placement, replace(ADAPTIVE, decisions=Decisions(layers=(1,) * 8))),
    }
    assert len(marks) == 5


def waited_for(way: BackgroundPlan) -> Proposal:
    found: Proposal = until(way.poll, "the proposal")
    return found


def test_a_background_process_finds_the_same() -> None:
    current, request = plan(ADAPTIVE), replace(ADAPTIVE, costs=MEASURED)
    way = BackgroundPlan(request, current, HANGS_S)
    assert waited_for(way) == propose(request, current)


def test_what_is_wrong_comes_back_in_a_line() -> None:
    way = BackgroundPlan(replace(ADAPTIVE, memory_limit=0.01), plan(ADAPTIVE), HANGS_S)
    with pytest.raises(BackgroundPlanError, match=r"0\.01 of 1F1B's is too small"):
        waited_for(way)


def test_a_plan_that_takes_too_long_is_given_up() -> None:
    way = BackgroundPlan(replace(ADAPTIVE, search_seconds=1000), plan(ADAPTIVE), 0.0)
    with pytest.raises(BackgroundPlanError, match="in time"):
        way.poll()
    assert way._process.poll() is not None


def test_a_process_that_dies_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def nonsense(request: Any, file: Any) -> None:
        file.write(b"nonsense")

    monkeypatch.setattr(background.pickle, "dump", nonsense)
    way = BackgroundPlan(ADAPTIVE, plan(ADAPTIVE), HANGS_S)
    with pytest.raises(BackgroundPlanError, match=r"ended with 1: .*Error"):
        waited_for(way)


DIES = """
import os, time
from pathlib import Path
from dataclasses import replace
from tests.planner.test_replanning import ADAPTIVE
from megatron.schedules.planner.background import BackgroundPlan
from megatron.schedules.planner.registry import plan

way = BackgroundPlan(replace(ADAPTIVE, search_seconds=100000), plan(ADAPTIVE), 600)
child = way._process.pid
while (nice := int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[16])) != 19:
    time.sleep(0.02)
time.sleep(0.5)  # between its lower priority and its last wish lie two calls
print(child, way.poll(), flush=True)
os._exit(9)
"""


@pytest.mark.nightly
def test_the_process_gives_way_to_all_others_and_does_not_outlive_the_job() -> None:
    job = subprocess.run([sys.executable, "-c", DIES], capture_output=True, text=True, timeout=HANGS_S)
    assert job.returncode == 9, job.stderr
    child, found = job.stdout.split()
    assert found == "None"
    until(lambda: not _runs(int(child)), "the end of the process")


def _runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
