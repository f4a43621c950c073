"""Plans stay what they are: a plan is changed on purpose, with its digest here, or not at all.

``python -m tests.planner.test_same_plans`` writes the digests anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.cost_parts import LayerTimes, Link, MemoryShares
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.model_loads import Load, ModelLoads, Part
from tests.planner.made_schedules import NAMED
from tests.tiers import by_night

DIGESTS = Path(__file__).with_name("plan_digests.json")
ALL = (*NAMED, "adaptive")
MOST_BY_DAY = 4
COSTS = {
    "equal": Costs(),
    "real": Costs.of(1, 1.1, 0.75, 0.05),
    "slow network": Costs.of(1, 3, 0.2, 2),
    "recomputing": Costs(
        LayerTimes(1, 1.1, 0.75, stock_recompute=1.0), link=Link(0.05), memory=MemoryShares(kept=0.06)
    ),
    "W holds little": Costs(LayerTimes(1, 1.1, 0.75), link=Link(0.05), memory=MemoryShares(0.3)),
}
# The first of eight stages holds three times as much as others, and the last takes three times as long.
FIRST, LAYER, LAST = (Part(split=Load(*load)) for load in ((0, 0, 0, 2), (1, 1, 1, 1), (2, 2, 2, 0)))
HEAVY_END = replace(COSTS["real"], model=ModelLoads(FIRST, (LAYER,) * 8, LAST))


def requests(name: str) -> Iterator[tuple[str, Request]]:
    """What is asked of schedule ``name``, by a word for each."""
    if name == "adaptive":
        for costs in COSTS:
            for d, n, limit in ((2, 5, 0.75), (4, 8, 0.4), (4, 16, 1.0), (5, 7, 0.55), (8, 16, 0.5)):
                yield (
                    f"{costs} {d} {n} {limit}",
                    Request(name, d, n, COSTS[costs], memory_limit=limit, search_seconds=0.03),
                )
        yield (
            "a heavy end",
            Request(name, 4, 9, HEAVY_END, memory_limit=1.0, search_seconds=0.03, chunk_choices=(1, 2)),
        )
        return
    for costs in COSTS:
        for d in (2, 3, 4, 7, 8):
            for n in sorted({1, d, 2 * d + 3}):
                yield f"{costs} {d} {n}", Request(name, d, n, COSTS[costs])
    yield "24 48", Request(name, 24, 48)
    yield "a heavy end", Request(name, 4, 9, HEAVY_END)


def digest(name: str, small: bool) -> str:
    """Of the plans of a schedule on few ranks, or of its others: names, placements and orders."""
    found = hashlib.sha256()
    for word, request in requests(name):
        if (request.ranks <= MOST_BY_DAY) != small:
            continue
        schedule = plan(request)
        rows = ["".join(map(str, row)) for row in schedule.order]
        found.update(repr((word, schedule.name, schedule.placement.rank_of, rows)).encode())
    return found.hexdigest()


@pytest.mark.parametrize("size", ["small", by_night("large")])
@pytest.mark.parametrize("name", ALL)
def test_every_plan_is_what_it_was(name: str, size: str):
    assert digest(name, size == "small") == json.loads(DIGESTS.read_text())[name][size]


if __name__ == "__main__":
    made = {name: {"small": digest(name, True), "large": digest(name, False)} for name in ALL}
    DIGESTS.write_text(json.dumps(made, indent=1) + "\n")
