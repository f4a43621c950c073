"""Plans stay what they are: a plan is changed on purpose, with its digest here, or not at all.

``python -m tests.planner.test_same_plans`` writes the digests anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.costs import Costs
from tests.planner.made_schedules import NAMED

DIGESTS = Path(__file__).with_name("plan_digests.json")
COSTS = {
    "equal": Costs(),
    "real": Costs(1, 1.1, 0.75, 0.05),
    "slow network": Costs(1, 3, 0.2, 2),
    "recomputing": Costs(1, 1.1, 0.75, 0.05, stock_recompute=1.0, kept=0.06),
    "W holds little": Costs(1, 1.1, 0.75, 0.05, weight_share=0.3),
}
HEAVY_END = Costs(1, 1.1, 0.75, 0.05, (1, 1, 1, 1, 1, 1, 1, 3), (3, 1, 1, 1, 1, 1, 1, 1))


def requests(name: str) -> Iterator[tuple[str, Request]]:
    """What is asked of schedule ``name``, by a word for each."""
    if name == "adaptive":
        for costs in COSTS:
            for d, n, limit in ((2, 5, 0.75), (4, 8, 0.4), (4, 16, 1.0), (5, 7, 0.55), (8, 16, 0.5)):
                yield (
                    f"{costs} {d} {n} {limit}",
                    Request(name, d, n, COSTS[costs], memory_limit=limit, search_seconds=0.03),
                )
        yield "a heavy end", Request(name, 4, 9, HEAVY_END, memory_limit=1.0, search_seconds=0.03, chunk_choices=(1, 2))
        return
    for costs in COSTS:
        for d in (2, 3, 4, 7, 8):
            for n in sorted({1, d, 2 * d + 3}):
                yield f"{costs} {d} {n}", Request(name, d, n, COSTS[costs])
    yield "24 48", Request(name, 24, 48)
    yield "a heavy end", Request(name, 4, 9, HEAVY_END)


def digest(name: str) -> str:
    """Of all plans of a schedule: names, placements and orders."""
    found = hashlib.sha256()
    for word, request in requests(name):
        schedule = plan(request)
        rows = ["".join(map(str, row)) for row in schedule.order]
        found.update(repr((word, schedule.name, schedule.placement.rank_of, rows)).encode())
    return found.hexdigest()


@pytest.mark.parametrize("name", [*NAMED, "adaptive"])
def test_every_plan_is_what_it_was(name: str):
    assert digest(name) == json.loads(DIGESTS.read_text())[name]


if __name__ == "__main__":
    DIGESTS.write_text(json.dumps({name: digest(name) for name in [*NAMED, "adaptive"]}, indent=1) + "\n")
