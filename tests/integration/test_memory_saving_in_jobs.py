"""Jobs that save memory by flag: stock's gradients to the bit, in less memory, and a line about what was planned."""

from __future__ import annotations

import pytest

from megatron.schedules.integration.flags import machine_memory
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.model_memory import EndMemory, LayerMemory, ModelMemory
from megatron.schedules.utils.errors import PlanError
from tests.integration.results import UNTIED
from tests.integration.test_same_result import assert_same_losses, differing

JOB = (*UNTIED, "--global-batch-size", "8", "--train-iters", "2", "--pipeline-model-parallel-size", "4")
LIMIT = "--pipeline-schedule adaptive:2"
HOW = {
    "recompute": "--pipeline-memory-limit 0.3 --pipeline-save-memory recompute",
    "offload": "--pipeline-memory-limit 0.3 --pipeline-save-memory offload=0.1 --pipeline-costs 4,4,3",
    "both": "--pipeline-memory-limit 0.2 --pipeline-save-memory both=0.1 --pipeline-costs 4,4,3",
}


@pytest.mark.parametrize("how", ["recompute", pytest.param("both", marks=pytest.mark.full_matrix), "offload"])
def test_a_job_that_saves_memory_has_stocks_gradients(train, how):
    ours = train(4, *JOB, *LIMIT.split(), *HOW[how].split())
    stock = train.stock(4, *JOB)
    assert_same_losses(ours, stock)
    assert differing(ours, stock) == []


@pytest.mark.parametrize("how", ["recompute", pytest.param("offload", marks=pytest.mark.full_matrix)])
def test_the_first_lines_say_what_is_recomputed_or_offloaded(megatron, how):
    from tests.integration.test_refusals import JOB as ONE
    from tests.integration.test_refusals import PP4

    (_, said), *_ = megatron("outputs", 4, [*ONE, *PP4, *LIMIT.split(), *HOW[how].split()])
    expected = "% of the layers recomputed" if how == "recompute" else "GiB of each rank's at most on the host"
    assert expected in said


def test_a_host_without_memory_is_told_before_the_start(monkeypatch):
    layer = LayerMemory(full=2**30, kept=2**30, weights=2**30)
    costs = Costs(memory=ModelMemory((layer,) * 4, input=0.0, first=EndMemory(), last=EndMemory()))
    monkeypatch.setattr(machine_memory, "available_host_bytes", lambda: 3 * 2**30)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert machine_memory.check_host(costs, 1.5, 4, is_dry=False) == 1.5 * 2**30
    with pytest.raises(PlanError, match=r"-memory offload takes 2\.0 GiB of host memory for each of 2 ranks"):
        machine_memory.check_host(costs, 2.0, 4, is_dry=False)
    assert machine_memory.check_host(costs, 0.0, 4, is_dry=False) == 0
