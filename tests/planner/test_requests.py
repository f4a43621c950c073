"""From a request to a plan: what cannot be planned is refused in one line, and the same request gives the same plan.

Every rank of a training job plans for itself: only so do their programs fit together.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.uneven_layers import uneven
from megatron.schedules.planner.registry import NAMES, WRITTEN, Request, describe, placement, plan, stages
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.text_forms import to_csv
from megatron.schedules.utils.errors import PlanError
from tests.planner.made_schedules import NAMED
from tests.waiting import HANGS_S

ROOT = Path(__file__).parents[2]
SEVEN_LAYERS = uneven(Costs(), (1.0,) * 7)
CSV = to_csv(plan(Request("v-half", 4, 2)))


def refused(request: Request) -> str:
    with pytest.raises(PlanError) as caught:
        plan(request)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (Request("v-half", 4, 0), "v-half needs at least 1 microbatch, not 0"),
        (Request("1f1b", 4, -3), "1f1b needs at least 1 microbatch, not -3"),
        (
            Request("interleaved-1f1b", 4, 8, chunks=1),
            "interleaved-1f1b needs at least 2 chunks a rank, not 1; with 1 chunk ask for 1f1b",
        ),
        (
            Request("interleaved-1f1b", 4, 8, chunks=0),
            "interleaved-1f1b needs at least 2 chunks a rank, not 0; with 1 chunk ask for 1f1b",
        ),
        (Request("v-haf", 4, 8), "unknown schedule 'v-haf': did you mean v-half?"),
        (Request("V-Half", 4, 8), "unknown schedule 'V-Half': did you mean v-half?"),
        (Request("gpipe?", 4, 8), f"unknown schedule 'gpipe?': use one of {', '.join(WRITTEN)}"),
        (Request("two\nlines", 4, 8), f"unknown schedule 'two\\nlines': use one of {', '.join(WRITTEN)}"),
        (
            Request("file", 4, 8),
            "schedule 'file' needs a CSV: name it in place of the schedule, such as mine.csv",
        ),
        (Request("file", 3, 2, csv=CSV), "the schedule's CSV is for 4 pipeline ranks, but 3 were asked for"),
        (Request("file", 4, 8, csv=CSV), "the schedule's CSV is for 2 microbatches, but 8 were asked for"),
        (
            Request("v-half", 4, 8, SEVEN_LAYERS, decisions=Decisions(layers=(3, 4))),
            "layers of 2 stages given for v (4 ranks x 2 chunks)",
        ),
        (
            Request("zb-1p", 4, 8, SEVEN_LAYERS, decisions=Decisions(layers=(2, 2, 2, 2))),
            "the stages have 8 layers, and the model 7",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value.schedule,
)
def test_a_request_that_makes_no_sense_is_refused(request_: Request, expected: str):
    assert refused(request_) == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_pipeline_has_at_least_two_ranks(name: str):
    assert refused(Request(name, 1, 8, csv="0F0,0B0")) == f"{name} needs at least 2 pipeline ranks, not 1"
    assert refused(Request(name, 0, 8)) == f"{name} needs at least 2 pipeline ranks, not 0"


@pytest.mark.parametrize("name", [*NAMED, "adaptive"])
def test_layers_must_fit_whatever_the_schedule(name: str):
    """Also where an order is stated rather than searched for: layers that do not fit it are a mistake all the same."""
    asked = Request(name, 4, 8, uneven(Costs(), (1.0,) * 17), memory_limit=1, decisions=Decisions(layers=(1,) * 17))
    assert "layers of 17 stages given for" in refused(asked)


def test_a_csv_is_planned_as_it_stands():
    schedule = plan(Request("file", 4, 2, csv=CSV))
    assert (schedule.name, to_csv(schedule)) == ("file", CSV)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_described_in_one_short_line(name: str):
    assert 0 < len(describe(name)) <= 100 and "\n" not in describe(name)


@pytest.mark.parametrize("name", NAMED)
def test_a_plan_bears_the_name_it_was_asked_for_by(name: str):
    assert plan(Request(name, 3, 4)).name == name


# --- the same for every rank of a job, and without what only training needs ---------------------------------------

PLANS = """
import hashlib
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.planner.registry import NAMES, Request, plan
from megatron.schedules.schedule.text_forms import to_csv
for name in NAMES[:-1]:
    for ranks, microbatches in ((3, 8), (4, 4), (5, 6)):
        costs = Costs.of(1, 1.1, 0.75, 0.05)
        text = to_csv(plan(Request(name, ranks, microbatches, costs, memory_limit=0.6, search_seconds=0.1)))
        print(name, ranks, microbatches, hashlib.sha256(text.encode()).hexdigest())
"""

IMPORTED = """
import sys
import megatron.schedules.planner.registry
import megatron.schedules.schedule.text_forms
print(len(sys.modules))
import megatron.schedules.planner.forward_only
megatron.schedules.planner.registry.plan(megatron.schedules.planner.registry.Request("v-half", 4, 8))
for name in sys.modules:
    print(name)
"""


def python(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.nightly
def test_two_processes_make_the_same_plans_whatever_their_hash_seeds():
    first, second = python(PLANS, PYTHONHASHSEED="1"), python(PLANS, PYTHONHASHSEED="4242")
    assert first == second
    assert len(first.splitlines()) == 3 * len([*NAMED, "adaptive"])


def test_planning_starts_at_once_and_needs_neither_torch_nor_megatron():
    imported, *modules = python(IMPORTED).splitlines()
    assert int(imported) < 300, "what starts at once imports little"
    assert "megatron.schedules.planner.registry" in modules
    outside = ("torch", "megatron.core", "megatron.training", "megatron.schedules.runtime", "megatron.schedules.report")
    assert not [name for name in modules if name.startswith(outside)]


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("chunks", [2, 3])
def test_where_the_stages_go_is_known_without_planning(name: str, chunks: int):
    asked = Request(name, 4, 6, chunks=chunks)
    assert placement(asked) == plan(asked).placement
    assert stages(asked) == plan(asked).placement.stages


def test_of_adaptive_it_is_known_how_many_stages_there_may_be_and_of_a_file_what_it_says():
    asked = Request("adaptive", 4, 6, memory_limit=1, chunk_choices=(1, 3))
    assert (placement(asked), stages(asked)) == (None, 12)
    file = Request("file", 4, 2, csv=CSV)
    assert (placement(file), stages(file)) == (plan(file).placement, 8)
