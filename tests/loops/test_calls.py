"""Schedules of ours serve every loop's call of the schedule function as stock does."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch

from tests.integration.test_core_loops import same
from tests.loops.frameworks import UnreachableError, site
from tests.loops.loop_calls import CALLS

OF_THE_INDEX = {name: call for name, call in CALLS.items() if "NeMo-RL" not in name and "slime" not in name}
UTILS = "megatron.core.pipeline_parallel.utils"
IMPORTED = {
    "is_pp_last_stage": UTILS,
    "is_pp_first_stage": UTILS,
    "get_forward_backward_func": "megatron.core.pipeline_parallel.schedules",
    "forward_backward_pipelining_without_interleaving": "megatron.core.pipeline_parallel.schedules",
}


@pytest.fixture(scope="module")
def stock(megatron: Any) -> Any:
    return megatron("called", None, 1)


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


def test_names_imported_before_install_are_replaced_too(megatron: Any) -> None:
    assert megatron("imported_before", IMPORTED) == dict.fromkeys(IMPORTED, True)


@pytest.mark.full_matrix
@pytest.mark.parametrize("name", OF_THE_INDEX)
def test_the_call_is_what_the_wheel_has(name: str) -> None:
    call = CALLS[name]
    try:
        source = (site() / call.source).read_text()
    except UnreachableError as error:
        pytest.skip(f"{name} cannot be downloaded: {error}")
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and node.lineno == call.line]
    arguments = {frozenset(keyword.arg for keyword in node.keywords) for node in calls}
    assert frozenset(call.arguments) in arguments, arguments
