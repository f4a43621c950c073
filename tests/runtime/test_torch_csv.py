"""torch's own pipeline runtime loads our CSV and gives the gradients of a plain run."""

from __future__ import annotations

import inspect
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.schedule.text_forms import to_csv
from tests.ranks import run_ranks
from tests.tolerances import assert_near, likely

pytestmark = pytest.mark.job

FEATURES = 8
ROWS = 3
"""Rows of one microbatch."""
LIMITS_SENDS = "max_outstanding_sends" in inspect.getsource(_PipelineScheduleRuntime.__init__)
"""Whether this torch can limit sends that are not finished: 2.15 can."""


def _stage(stage: int) -> nn.Module:
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(FEATURES, FEATURES, dtype=torch.float64), nn.GELU())


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum()


def _batch(microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(99)
    shape = microbatches * ROWS, FEATURES
    return torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)


def _torch_body(csv: str, placement: Placement, microbatches: int, options: dict[str, int]) -> dict[int, list]:
    rank = dist.get_rank()
    modules = {stage: _stage(stage) for stage in placement.stages_of(rank)}
    stages = []
    for stage, module in modules.items():
        # torch reads from these examples which messages carry a gradient back.
        inputs = torch.zeros(ROWS, FEATURES, dtype=torch.float64, requires_grad=stage > 0)
        outputs = torch.zeros(ROWS, FEATURES, dtype=torch.float64, requires_grad=True)
        stages.append(
            PipelineStage(module, stage, placement.stages, torch.device("cpu"), input_args=inputs, output_args=outputs)
        )
    runtime = _PipelineScheduleRuntime(stages, microbatches, loss_fn=_loss, scale_grads=False, **options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        path.write_text(csv)
        runtime._load_csv(str(path))
    inputs, targets = _batch(microbatches)
    losses: list[torch.Tensor] = []
    runtime.step(
        *([inputs] if 0 in modules else []),
        **({"target": targets, "losses": losses} if placement.last_stage in modules else {}),
    )
    return {stage: [p.grad.numpy() for p in module.parameters()] for stage, module in modules.items()}


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "options"),
    [
        ("v-half", 2, 4, {}),
        ("v-half", 4, 8, {}),
        ("v-min", 3, 5, {}),
        ("v-zb", 4, 6, {}),
        ("zb-1p", 3, 6, {}),
        ("interleaved-1f1b", 2, 4, {}),
        pytest.param(
            *("v-half", 3, 6, {"max_outstanding_sends": 2}),
            marks=pytest.mark.skipif(not LIMITS_SENDS, reason="this torch does not limit sends; 2.15 does"),
        ),
    ],
)
def test_torch_runs_our_csv(name: str, ranks: int, microbatches: int, options: dict[str, int]):
    schedule = plan(Request(name, ranks, microbatches))
    placement = schedule.placement
    model = nn.Sequential(*(_stage(stage) for stage in range(placement.stages)))
    inputs, targets = _batch(microbatches)
    for x, y in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
        _loss(model(x), y).backward()

    found = run_ranks(ranks, _torch_body, to_csv(schedule), placement, microbatches, options)
    gradients = {stage: grads for rank_found in found for stage, grads in rank_found.items()}
    assert sorted(gradients) == list(range(placement.stages))
    # Twice a sum and a GELU in each stage, forwards and backwards, and a sum over all rows; torch adds up as it likes.
    roundings = 2 * placement.stages * (FEATURES + 8) + microbatches * ROWS
    bound = 2 * likely(roundings, torch.float64)
    for stage, module in enumerate(model):
        for parameter, gradient in zip(module.parameters(), gradients[stage], strict=True):
            assert parameter.grad is not None
            assert_near(torch.from_numpy(gradient), parameter.grad, bound, f"stage {stage}")
