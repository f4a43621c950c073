"""Userbuffers under a split backward, over Transformer Engine's own Python: numbers are those of the whole backward.

The buffers of :mod:`tests.support.te_userbuffers` are overwritten as a GPU's are.
"""

from __future__ import annotations

from typing import Any

import pytest

from megatron.schedules.estimate.parallel_sizes import ParallelSizes
from megatron.schedules.job.plan_summary import switched_off
from megatron.schedules.job.spec import JobSpec, Settings, StockFlags
from megatron.schedules.job.values import ScheduleChoice
from megatron.schedules.planner.registry import Request
from megatron.schedules.planner.service import make_plan
from tests.integration.server import VERSIONS, Megatron
from tests.support.te_python import CAPABILITY_VARIABLE
from tests.tiers import by_night, some_by_night

PLAIN = "bf16"
# Transformer Engine has Userbuffers for these.
RECIPES = {"9.0": ("tensorwise", "delayed"), "10.0": (PLAIN, "tensorwise on Blackwell", "mxfp8")}

NUMBERS = 4 * (3 + 3 + 12)
"""Of each recipe in four settings: outputs and gradients of three inputs, and gradients of parameters."""


@pytest.fixture
def overlapped(te: Megatron, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a function of :mod:`.te_overlapped` on two tensor-parallel ranks."""

    def run(name: str, *args: Any, capability: str = "10.0") -> Any:
        monkeypatch.setenv(CAPABILITY_VARIABLE, capability)
        return te("in_groups", 2, called, name, *args, tensor_model_parallel_size=2)

    return run


def called(name: str, *args: Any) -> Any:
    """A function of :mod:`.te_overlapped`, which needs Transformer Engine to be imported."""
    from tests.integration import te_overlapped

    return getattr(te_overlapped, name)(*args)


@pytest.mark.job
@pytest.mark.parametrize(
    ("capability", "recipe"),
    some_by_night(
        ((capability, recipe) for capability, recipes in RECIPES.items() for recipe in recipes),
        lambda capability, recipe: recipe != PLAIN,
    ),
)
def test_split_backwards_have_the_numbers_of_whole_ones(overlapped: Any, capability: str, recipe: str) -> None:
    assert overlapped("every_setting", [recipe], capability=capability) == [NUMBERS] * 2


def test_a_gradient_that_waits_in_i_for_its_product_is_not_in_a_buffer(overlapped: Any) -> None:
    assert overlapped("one_linear_trained", PLAIN) == [8, 8]


@pytest.mark.parametrize("recipe", [PLAIN, "tensorwise on Blackwell", by_night("mxfp8")])
def test_planted_faults_are_found(overlapped: Any, recipe: str) -> None:
    """Bulk overlaps that stay on, and gradients that stay in a buffer until W."""
    for found in overlapped("faults", recipe):
        assert "not supported with Userbuffers" in found["BULK"]
        assert "differs" in found["out_of_buffers"]


def test_the_log_names_what_is_switched_off() -> None:
    def said(schedule: str, *given: str, linears: str = "transformer_engine") -> list[str]:
        stock = StockFlags(frozenset(given), linears)
        spec = JobSpec(Settings(ScheduleChoice(schedule, schedule)), ParallelSizes(2, 2), stock=stock)
        return [each.partition(" ")[0] for each in switched_off(spec, make_plan(Request(schedule, 2, 4)).schedule)]

    overlap, late = "tp_comm_overlap", "defer_embedding_wgrad_compute"
    messages = "overlap_moe_expert_parallel_comm"
    assert said("zb-1p", overlap, late) == ["--tp-comm-overlap:", "--defer-embedding-wgrad-compute"]
    assert (
        said("1f1b", overlap, late) == said("zb-1p", overlap, late, linears="local") == [f"--{late}".replace("_", "-")]
    )
    assert said("zb-1p") == said("zb-1p", messages) == []
    assert said("1f1b", messages) == [f"--{messages}".replace("_", "-")]


@pytest.mark.nightly
@pytest.mark.parametrize("version", VERSIONS[:-1])
def test_older_versions(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Megatron(version)
    for capability, names in RECIPES.items():
        # Quantized buffers of the first version are other ones, which the CPU form does not have.
        known = [name for name in names if version != VERSIONS[0] or name == PLAIN]
        monkeypatch.setenv(CAPABILITY_VARIABLE, capability)
        found = server("in_groups", 2, called, "every_setting", known, tensor_model_parallel_size=2)
        assert found == [len(known) * NUMBERS] * 2
    server.close()
