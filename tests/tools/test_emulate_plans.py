"""scripts/emulate_plans.py: plans with passes that sleep take the time that was planned, one against the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.schedules.measure.recorded_run import Recorded, to_text
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.simulator import Timeline, simulate
from megatron.schedules.schedule.text_forms import from_csv
from megatron.schedules.utils.errors import PlanError
from scripts import emulate_plans


def timeline(name: str, ranks: int = 2, microbatches: int = 4) -> Timeline:
    request = Request(name, ranks, microbatches, Costs.of(1, 1.25, 0.75))
    schedule = plan(request)
    return simulate(schedule, request.costs_on(schedule.placement))


@pytest.mark.nightly  # some seconds of starting processes
def test_plans_take_their_planned_time() -> None:
    plans = [(name, timeline(name)) for name in ("v-half", "1f1b")]
    for found in emulate_plans.emulate(plans, 10):
        assert found.seconds == pytest.approx(found.planned, rel=0.1)


def test_the_table_has_ratios_to_the_last_plan() -> None:
    found = [emulate_plans.Emulated("v", 1.0, 1.25, 0.2), emulate_plans.Emulated("base", 2.0, 2.5, 0.6)]
    rows = {line[:31].strip(): line[31:].split() for line in emulate_plans.table(found).splitlines()}
    assert rows["iteration time, planned"] == ["1.000", "s", "2.000", "s", "0.50"]
    assert rows["iteration time, passes asleep"] == ["1.250", "s", "2.500", "s", "0.50"]
    assert rows["bubble, passes asleep"] == ["36.0", "%", "68.0", "%"]


@pytest.mark.parametrize(
    ("plans", "message"),
    [
        ([("a", timeline("1f1b")), ("b", timeline("1f1b", 4))], "the plans are for 2 and 4 ranks"),
        (
            [("a", simulate(s := from_csv("0F0,0R0,0B0\n"), Costs.of(1, 1, 1).on(s.placement)))],
            "a has passes of kind R",
        ),
    ],
)
def test_plans_that_cannot_be_emulated_are_refused(plans: list[tuple[str, Timeline]], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        emulate_plans.emulate(plans, 10)


def test_a_wrong_argument_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recorded.json").write_text(to_text(Recorded(timeline("1f1b"), timeline("1f1b"), 5, "none")))
    for argument in (str(tmp_path / "recorded.json"), f"a={tmp_path}/none.json"):
        with pytest.raises(SystemExit) as ended:
            emulate_plans.main([argument])
        assert ended.value.code == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
