"""Schedules of ours serve every loop's call of the schedule function as stock does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integration.test_core_loops import same
from tests.loops.loop_calls import CALLS


@pytest.fixture(scope="module")
def stock(megatron: Any) -> Any:
    return megatron("called", None, 1)


@pytest.mark.job
@pytest.mark.parametrize(("schedule", "chunks"), [("zb-1p", 1), ("v-half", 2)])
def test_results_and_gradients_of_each_loops_call_are_stocks(
    megatron: Any, stock: Any, schedule: str, chunks: int
) -> None:
    ours = megatron("called", schedule, chunks)
    for at, (name, call) in enumerate(CALLS.items()):
        assert len(stock[-1][at].results) == 5 and same(ours[-1][at].results, stock[-1][at].results), name
        found, expected = ({k: v for rank in ranks for k, v in rank[at].gradients.items()} for ranks in (ours, stock))
        assert found.keys() == expected.keys(), name
        assert all(torch.equal(found[key], gradient) for key, gradient in expected.items()), name
        assert any(gradient.any() for gradient in expected.values()) != call.forward_only, name
        assert all(rank[at].passes["F"] == 5 * chunks for rank in ours) and not stock[-1][at].passes, name


@pytest.mark.job
@pytest.mark.parametrize(
    ("module", "name"),
    [("utils", "is_pp_last_stage"), ("schedules", "forward_backward_pipelining_without_interleaving")],
)
def test_names_imported_before_install_are_replaced_too(megatron: Any, module: str, name: str) -> None:
    assert megatron("imported_before", f"megatron.core.pipeline_parallel.{module}", name)
