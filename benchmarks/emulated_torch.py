"""torch.distributed.pipelining's schedules on passes that sleep: its stages, its messages, its loops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from benchmarks.emulated_passes import SHAPE, Layers, Passes
from megatron.schedules.schedule.kinds import Kind, Pass
from megatron.schedules.schedule.placement import Placement, interleaved, zigzag
from megatron.schedules.schedule.schedule import Schedule

ONE_CHUNK = Schedule1F1B
TWO_CHUNKS: dict[str, tuple[Any, Callable[[int, int], Placement]]] = {
    "Interleaved1F1B": (ScheduleInterleaved1F1B, interleaved),
    "InterleavedZeroBubble": (ScheduleInterleavedZeroBubble, interleaved),
    "ZBV": (ScheduleZBVZeroBubble, zigzag),
}


def order(name: str, ranks: int, microbatches: int) -> Schedule:
    """Returns the passes of one of ``TWO_CHUNKS`` in torch's order, without a process group."""
    kind, place = TWO_CHUNKS[name]
    of_rank_0 = [SimpleNamespace(num_stages=2 * ranks, group_size=ranks, group_rank=0, submod=None)] * 2
    made = kind(of_rank_0, microbatches, loss_fn=_loss).pipeline_order
    rows = (tuple(Pass.parse(str(action)) for action in made[rank] if action) for rank in range(ranks))
    return Schedule(name, place(ranks, 2), microbatches, tuple(rows))


def start(kind: Any, placement: Placement, microbatches: int, passes: Passes) -> Callable[[], None]:
    """Returns a function that runs one iteration of torch's schedule ``kind``."""
    stages = [_stage(stage, placement.stages, passes) for stage in placement.stages_of(dist.get_rank())]
    schedule = kind(stages if placement.chunks > 1 else stages[0], microbatches, loss_fn=_loss, scale_grads=False)
    whole = torch.zeros((SHAPE[0] * microbatches, *SHAPE[1:]))
    inputs = [whole] if any(stage.is_first for stage in stages) else []
    targets = {"target": whole} if any(stage.is_last for stage in stages) else {}
    return lambda: schedule.step(*inputs, **targets, return_outputs=False)


def _stage(stage: int, stages: int, passes: Passes) -> PipelineStage:
    return PipelineStage(
        Layers(passes, stage, Kind.I),
        stage,
        stages,
        torch.device("cpu"),
        # torch reads from these examples which messages carry a gradient back.
        input_args=torch.zeros(SHAPE, requires_grad=stage > 0),
        output_args=torch.zeros(SHAPE, requires_grad=True),
        dw_builder=lambda: partial(passes.run, Kind.W, stage),
    )


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return output.sum()
