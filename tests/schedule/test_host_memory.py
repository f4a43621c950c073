"""Host memory that copies take: blocks, used again, and as many as the run time makes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.runtime.host_buffers import HostMemory
from megatron.schedules.schedule.cost_parts import HostCopies, LayerTimes, Link
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.host_memory import made, taken
from megatron.schedules.schedule.kinds import Kind, Share
from megatron.schedules.schedule.text_forms import from_csv

OFFLOADED = Decisions(offloaded=(1.0,))


def blocks(csv: str, decisions: Decisions) -> float:
    schedule = from_csv(csv)
    (found,) = taken(schedule, Costs().on(schedule.placement, decisions))
    return found


@pytest.mark.parametrize(
    ("csv", "number"),
    [
        ("0F0,0B0\n", 0),
        ("0F0,0O0,0L0,0B0,0F1,0O1,0L1,0B1\n", 1),
        ("0F0,0F1,0O0,0O1,0L1,0B1,0L0,0B0\n", 2),
        # Given back where the copy back begins, though the backward comes later.
        ("0F0,0O0,0L0,0F1,0O1,0B0,0L1,0B1\n", 1),
    ],
)
def test_a_block_is_used_again_from_its_l_on(csv: str, number: int):
    assert blocks(csv, OFFLOADED) == pytest.approx(number * made(1))


@pytest.mark.parametrize("parts", [(1.0, 0.5, 0.25), (0.25, 1.0, 0.0), (0.5, 0.25, 1.0)])
def test_the_run_time_makes_as_many(parts: tuple[float, ...]):
    """Its rank has stages that copy as much as one another, or much less, or nothing."""
    costs = Costs(LayerTimes(1, 1.1, 0.75), link=Link(0.05), copies=HostCopies(0.3))
    decisions = Decisions(offloaded=tuple(parts[stage % 3] for stage in range(12)))
    request = Request("adaptive", 3, 9, costs, memory_limit=0.6, chunk_choices=(4,), search_seconds=0.2)
    request = replace(request, decisions=decisions)
    schedule = plan(request)
    of_stages = request.costs_on(schedule.placement)
    unit = 2**26
    for row, found in zip(schedule.order, taken(schedule, of_stages), strict=True):
        assert found > 0
        memory, held = HostMemory(lambda size: torch.empty(size, dtype=torch.uint8, device="meta")), {}
        leaving = {(stage, m) for stage, kind, m in row if kind is Kind.O}
        for stage, kind, m in row:
            if kind is Kind.F and (stage, m) in leaving:
                held[stage, m] = memory.take(round(of_stages.held[Share.OFFLOADED][stage] * unit))
            elif kind is Kind.L:
                memory.release(held.pop((stage, m)), None)
        assert memory.bytes == pytest.approx(found * unit, rel=1e-3)
