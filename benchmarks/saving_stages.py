"""Our stages whose forwards keep real tensors: R recomputes them, O and L copy them at the planned bandwidth."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.emulated_ours import carry_out
from benchmarks.emulated_passes import SHAPE, Passes
from benchmarks.saving_tensors import Part
from megatron.schedules.programs.program import Program
from megatron.schedules.runtime.activation_meter import ActivationMeter, Hold
from megatron.schedules.runtime.copies import ThreadCopies
from megatron.schedules.runtime.offload import Offloads
from megatron.schedules.runtime.recompute import Recomputes, recompute_layer
from megatron.schedules.runtime.stage_interface import Stages
from megatron.schedules.schedule.kinds import Kind, Share
from megatron.schedules.schedule.stage_costs import StageCosts

_MARKS = 251  # fewer than a byte can tell, and no power of two, as blocks that are used again come round by


def start(
    programs: Sequence[Program], rank_bytes: int, passes: Passes, meter: ActivationMeter | None
) -> Callable[[], None]:
    """Returns a function that runs this rank's one of ``programs`` once.

    Args:
        programs: of all ranks.
        rank_bytes: that a microbatch's activations take on a rank where all are kept.
        passes: their times and, by their costs, what they hold.
        meter: counts what is held; None where nobody asks.
    """
    program = programs[dist.get_rank()]
    stages = MemorySavingStages(passes, program, rank_bytes, meter)

    def run() -> None:
        carry_out(program, stages)
        stages.assert_empty()

    return run


class MemorySavingStages(Stages):
    """The stages of one rank; what their forwards keep stays until W, unless it is recomputed or offloaded."""

    def __init__(self, passes: Passes, program: Program, rank_bytes: int, meter: ActivationMeter | None) -> None:
        self._passes, self._program, self._meter = passes, program, meter
        self._recomputes = Recomputes(lambda: nullcontext)
        self._offloads = Offloads(ThreadCopies(_gbps(passes.costs, rank_bytes)))
        self._offloads.meter = meter
        self._chunks: dict[int, dict[Share, Part]] = {}
        for stage in program.placement.stages_of(program.rank):
            sizes = {
                share: round(passes.costs.held[share][stage] * rank_bytes)
                for share in (Share.OFFLOADED, Share.RECOMPUTED, Share.FORWARD)
            }
            self._chunks[stage] = {share: Part(size, self._leave) for share, size in sizes.items() if size}
            if again := self._chunks[stage].get(Share.RECOMPUTED):
                recompute_layer(again, self._recomputes)
        self._open: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._left: dict[tuple[int, int], list[tuple[Tensor, Hold | None]]] = {}
        self._now = (0, 0)

    def forward(
        self, stage: int, microbatch: int, activation: Tensor | None, *, split: bool, recompute: bool
    ) -> Tensor:
        x = torch.zeros(SHAPE) if activation is None else activation.requires_grad_()
        with ExitStack() as around:
            if self._program.offloads(stage, microbatch):
                around.enter_context(self._offloads.forward(stage, microbatch))
            if recompute:
                around.enter_context(self._recomputes.forward(stage, microbatch))
            around.enter_context(self._counting())
            around.enter_context(self._taking(Kind.F, stage))
            output = x
            for share, part in self._chunks[stage].items():
                with self._offloads.saving() if share is Share.OFFLOADED else nullcontext():
                    output = part(output, microbatch % _MARKS)
        self._open[stage, microbatch] = x, output
        return output

    def recompute_forward(self, stage: int, microbatch: int) -> None:
        with self._taking(Kind.R, stage), self._counting():
            self._recomputes.run(stage, microbatch)

    def offload(self, stage: int, microbatch: int) -> None:
        self._offloads.offload(stage, microbatch)

    def load(self, stage: int, microbatch: int) -> None:
        self._offloads.load(stage, microbatch)

    def backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        found = self._backward(Kind.B, stage, microbatch, gradient)
        del self._left[stage, microbatch]
        return found

    def backward_input(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        return self._backward(Kind.I, stage, microbatch, gradient)

    def backward_weight(self, stage: int, microbatch: int) -> None:
        with self._taking(Kind.W, stage):
            del self._left[stage, microbatch]

    def reduce_gradients(self, stage: int) -> None: ...

    def assert_empty(self) -> None:
        """Raises RuntimeError where something is still offloaded, or waits for its R or its W."""
        self._offloads.assert_empty()
        self._recomputes.assert_empty()
        if self._open or self._left:
            raise RuntimeError(f"still held: {[*self._open, *self._left]}")

    def _backward(self, kind: Kind, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        if self._program.offloads(stage, microbatch):
            self._offloads.arrive(stage, microbatch)
        self._now = stage, microbatch
        self._left[self._now] = []
        x, output = self._open.pop(self._now)
        with self._taking(kind, stage):
            torch.autograd.backward(output.sum() if gradient is None else output, gradient)
        return x.grad

    def _leave(self, kept: Tensor) -> None:
        """To W."""
        self._left[self._now].append((kept, self._meter.hold([kept]) if self._meter else None))

    @contextmanager
    def _taking(self, kind: Kind, stage: int) -> Iterator[None]:
        """Makes the body take as long as such a pass."""
        begun = time.monotonic()
        yield
        self._passes.fill(kind, stage, begun)

    def _counting(self) -> AbstractContextManager[None]:
        return self._meter.recording() if self._meter else nullcontext()


def _gbps(costs: StageCosts, rank_bytes: int) -> float:
    """Returns the bandwidth at which each stage's copy takes its planned time."""
    times = costs.times.get(Kind.O, ())
    rates = [
        held * rank_bytes / time / 1e9 for held, time in zip(costs.held[Share.OFFLOADED], times, strict=False) if time
    ]
    return max(rates, default=math.inf)
