"""Our engine on passes that sleep: lowered programs, its own transport, nothing replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.schedules.planning.passes import Kind
from megatron.schedules.runtime.engine import run
from megatron.schedules.runtime.program import Channel, Program, channels_of
from megatron.schedules.runtime.transport import Channels, GroupTransport, MessageSpec, make_channels
from tools.benchmarks.emulated_passes import SHAPE, Layers, Passes

_SPEC = MessageSpec(SHAPE, torch.float32, torch.device("cpu"))


def start(programs: Sequence[Program], passes: Passes) -> Callable[[], None]:
    """What carries out this rank's one of ``programs`` once."""
    program = programs[dist.get_rank()]
    channels = _channels(channels_of(program.placement))
    stages = _Stages(passes, program.placement.stages_of(program.rank))
    return lambda: run(program, stages, GroupTransport(channels, _SPEC))


@cache
def _channels(wanted: tuple[Channel, ...]) -> Channels:
    return make_channels([range(dist.get_world_size())], wanted)


class _Stages:
    """The stages of one rank, as :class:`megatron.schedules.runtime.stages.Stages` asks for them."""

    def __init__(self, passes: Passes, stages: Sequence[int]) -> None:
        self._passes = passes
        self._layers = {stage: Layers(passes, stage, Kind.I) for stage in stages}
        self._open: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def forward(self, stage: int, microbatch: int, activation: Tensor | None, *, split: bool) -> Tensor:
        x = torch.zeros(SHAPE) if activation is None else activation.requires_grad_()
        output = self._layers[stage](x)
        self._open[stage, microbatch] = x, output
        return output

    def backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        found = self.backward_input(stage, microbatch, gradient)
        self.backward_weight(stage, microbatch)
        return found

    def backward_input(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        x, output = self._open.pop((stage, microbatch))
        torch.autograd.backward(output.sum() if gradient is None else output, gradient)
        return x.grad

    def backward_weight(self, stage: int, microbatch: int) -> None:
        self._passes.run(Kind.W, stage)
