"""What is read from elsewhere answers its request, or is refused with the reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.schedules.estimate.models import MODELS
from megatron.schedules.estimate.times import loads
from megatron.schedules.planner.layer_partition import partition_layers, placed
from megatron.schedules.planner.memory_saving import save_memory
from megatron.schedules.planner.plan_checks import check_layers, check_plan, check_shares
from megatron.schedules.planner.registry import NAMES, Request, plan
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.placement import interleaved, sequential, zigzag
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.text_forms import from_csv
from megatron.schedules.utils.errors import PlanError

COSTS = Costs(1, 1.1, 0.75, 0.05)
MODEL = replace(COSTS, model=loads(MODELS["Llama-3-8B"].whole))
ADAPTIVE = Request("adaptive", 3, 4, COSTS, memory_limit=0.7, search_seconds=0.01)
BY_NAME = [name for name in NAMES if name not in ("adaptive", "file")]
LAYERED = replace(ADAPTIVE, ranks=4, costs=MODEL, chunk_choices=(1, 2))


@pytest.mark.parametrize("costs", [COSTS, MODEL, replace(MODEL, shared_vocabulary=True)], ids=["", "model", "shared"])
@pytest.mark.parametrize("name", BY_NAME)
def test_every_plan_by_name_answers_its_request(name: str, costs: Costs):
    request = Request(name, 4, 6, costs)
    check_plan(plan(request), request)


@pytest.mark.parametrize(
    "request_",
    [
        *(replace(ADAPTIVE, memory_limit=limit) for limit in (0.34, 0.5, 1.0, 2.0)),
        replace(ADAPTIVE, placement=zigzag(3, 2)),
        replace(ADAPTIVE, chunk_choices=(1,)),
        replace(ADAPTIVE, costs=Costs(100, 110, 75, 0)),
        replace(ADAPTIVE, costs=replace(COSTS, weight_share=0.4, stock_recompute=1.0, kept=0.1)),
        replace(ADAPTIVE, decisions=Decisions(recomputed=(0.5,) * 6), chunk_choices=(2,)),
        replace(
            ADAPTIVE,
            costs=replace(COSTS, copy=0.4),
            decisions=Decisions(offloaded=(1.0, 0.0) * 3),
            chunk_choices=(2,),
        ),
        replace(ADAPTIVE, ranks=4, costs=replace(MODEL, shared_vocabulary=True), memory_limit=1.5),
    ],
)
def test_every_adaptive_plan_answers_its_request(request_: Request):
    check_plan(plan(request_), request_)


def of_csv(text: str, name: str) -> Schedule:
    return replace(from_csv(text), name=name)


SPLIT = "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1W0,1F1,1I1,1W1"
RECOMPUTED = "0F0,0F1,0R0,0B0,0B1\n1F0,1B0,1F1,1B1"
OFFLOADED = "0F0,0F1,0O0,0L0,0B0,0B1\n1F0,1B0,1F1,1B1"
SHARED = "0F0,0S0,0B0,0T0\n1F0,1S0,1B0,1T0"
TWO = Request("1f1b", 2, 2)


@pytest.mark.parametrize(
    ("schedule", "request_", "why"),
    [
        (plan(TWO), replace(TWO, ranks=3), "for 2 ranks and 2 microbatches, not 3 and 2"),
        (plan(TWO), replace(TWO, microbatches=3), "for 2 ranks and 2 microbatches, not 2 and 3"),
        (plan(TWO), replace(TWO, schedule="zb-1p"), "the plan is '1f1b', not zb-1p"),
        (of_csv(SPLIT, "mine"), TWO, "the plan is 'mine'"),
        (of_csv(SPLIT, "file"), replace(ADAPTIVE, ranks=2, microbatches=2), "the plan is 'file'"),
        (of_csv(SPLIT, "1f1b"), TWO, "passes [IW] on stage"),
        (of_csv(RECOMPUTED, "1f1b"), TWO, "passes R on stage 0"),
        (of_csv(OFFLOADED, "1f1b"), TWO, "passes [OL] on stage 0"),
        (of_csv(SHARED, "1f1b"), replace(TWO, microbatches=1), "passes [ST] on stage"),
        (plan(TWO), replace(TWO, costs=replace(MODEL, shared_vocabulary=True)), "no S and T"),
        (
            replace(plan(replace(TWO, schedule="interleaved-1f1b")), name="v-half"),
            replace(TWO, schedule="v-half"),
            "placed on interleaved",
        ),
        (
            replace(plan(replace(ADAPTIVE, chunk_choices=(2,))), name="adaptive"),
            replace(ADAPTIVE, chunk_choices=(1,)),
            "placed on",
        ),
        (plan(replace(ADAPTIVE, schedule="1f1b")), replace(ADAPTIVE, chunk_choices=(2, 4)), "placed on sequential"),
        (plan(replace(ADAPTIVE, schedule="1f1b")), replace(ADAPTIVE, placement=zigzag(3, 2)), "placed on sequential"),
        (plan(replace(ADAPTIVE, schedule="1f1b")), ADAPTIVE, "holds 3 microbatches, and the request allows 2.1"),
        (Schedule("1f1b", sequential(2), 2, ((), ())), TWO, "is missing"),
        (
            replace(plan(replace(ADAPTIVE, schedule="interleaved-1f1b", memory_limit=None)), name="adaptive"),
            replace(ADAPTIVE, memory_limit=3),
            "placed on interleaved",
        ),
    ],
)
def test_a_plan_that_a_request_cannot_have_is_refused(schedule: Schedule, request_: Request, why: str):
    with pytest.raises(PlanError, match=why):
        check_plan(schedule, request_)


def test_a_layer_partition_that_was_searched_answers_its_request():
    for request in (
        replace(LAYERED, schedule="zb-1p", memory_limit=None),
        replace(LAYERED, ranks=2, chunk_choices=(1,)),
    ):
        found = partition_layers(request)
        assert found.decisions.layers is not None
        check_layers(found.decisions.layers, found.chunk_choices, request)
        check_plan(plan(found), found)


@pytest.mark.parametrize(
    ("layers", "chunks"),
    [
        ((8, 8, 8, 7), (1,)),
        ((8, 8, 8, 9), (1,)),
        ((-1, 17, 8, 8), (1,)),
        ((16, 16), (1,)),
        ((), (1,)),
        ((8, 8, 8, 8), (2,)),
        ((8, 8, 8, 8), ()),
        ((8, 8, 8, 8), (1, 2)),
        ((2,) * 16, (4,)),
        ((8, 8, 8, 8), (-1,)),
    ],
)
def test_a_layer_partition_that_a_request_cannot_have_is_refused(layers: tuple[int, ...], chunks: tuple[int, ...]):
    check_layers((8, 8, 8, 8), (1,), LAYERED)
    with pytest.raises(PlanError):
        check_layers(layers, chunks, LAYERED)


def test_a_schedule_by_name_has_the_chunks_it_was_asked_for_with():
    request = Request("v-half", 4, 8, MODEL)
    check_layers((4,) * 8, request.chunk_choices, request)
    for layers, chunks in (((8,) * 4, request.chunk_choices), ((4,) * 8, (2,))):
        with pytest.raises(PlanError):
            check_layers(layers, chunks, request)
    with pytest.raises(PlanError, match="where the model is known"):
        check_layers((4,) * 8, request.chunk_choices, replace(request, costs=COSTS))


@pytest.mark.parametrize(("recompute", "offload"), [(True, False), (False, True), (True, True)])
def test_shares_that_were_searched_answer_their_request(recompute: bool, offload: bool):
    for known in (replace(LAYERED, costs=COSTS), placed(LAYERED, (2, 3, 3, 3, 6, 5, 5, 5), (2,))):
        request = replace(known, costs=replace(known.costs, copy=0.5), chunk_choices=(2,), memory_limit=0.35)
        request = replace(request, recompute=recompute, offload=offload)
        found = save_memory(request)
        check_shares(found.decisions.recomputed, found.decisions.offloaded, found.chunk_choices, request)


HALF, NONE = (0.5,) * 4, (0.0,) * 4


@pytest.mark.parametrize(
    ("recompute", "offload", "recomputed", "offloaded", "chunks"),
    [
        (False, True, HALF, None, (1,)),
        (True, False, None, HALF, (1,)),
        (True, True, HALF[:3], None, (1,)),
        (True, True, (), None, (1,)),
        (True, True, HALF, None, (2,)),
        (True, True, HALF, None, (1, 2)),
        (True, True, None, None, (4,)),
        (True, True, (0.5, 0.5, 0.5, 1.5), None, (1,)),
        (True, True, (-0.5, 0.5, 0.5, 0.5), None, (1,)),
        (True, True, (float("nan"), 0.5, 0.5, 0.5), None, (1,)),
        (True, True, HALF, (0.6, 0.5, 0.5, 0.5), (1,)),
    ],
)
def test_shares_that_a_request_does_not_allow_are_refused(
    recompute: bool,
    offload: bool,
    recomputed: tuple[float, ...] | None,
    offloaded: tuple[float, ...] | None,
    chunks: tuple[int, ...],
):
    check_shares(HALF, HALF, (1,), replace(LAYERED, recompute=True, offload=True))
    check_shares(None, None, LAYERED.chunk_choices, replace(LAYERED, recompute=True))
    with pytest.raises(PlanError):
        check_shares(recomputed, offloaded, chunks, replace(LAYERED, recompute=recompute, offload=offload))


def test_interleaved_may_be_the_answer_of_adaptive():
    schedule = plan(Request("interleaved-1f1b", 3, 6, COSTS))
    assert schedule.placement == interleaved(3, 2)
    check_plan(schedule, replace(ADAPTIVE, microbatches=6, memory_limit=2.0))
