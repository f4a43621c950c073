"""Our engine on passes that sleep: lowered programs, its own transport, nothing replaced."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.emulated_passes import SHAPE, Layers, Passes
from megatron.schedules.programs.program import COLLECTIVES, Channel, Op, Program, channels_of
from megatron.schedules.runtime.engine import Observer, run
from megatron.schedules.runtime.stage_interface import Stages
from megatron.schedules.runtime.transport import (
    Channels,
    MessageSpec,
    Transport,
    make_channels,
    make_collective_group,
)
from megatron.schedules.schedule.kinds import Kind

_SPEC = MessageSpec(SHAPE, torch.float32, torch.device("cpu"))
_ROUNDS = 2  # the second corrects the first, whose sleeps were too long


def start(programs: Sequence[Program], passes: Passes, observers: Sequence[Observer] = ()) -> Callable[[], None]:
    """Returns a function that runs this rank's one of ``programs`` once."""
    program = programs[dist.get_rank()]
    stages = SleepingStages(passes, program)
    return lambda: carry_out(program, stages, observers)


def carry_out(program: Program, stages: Stages, observers: Sequence[Observer] = ()) -> None:
    """Runs ``program`` once, on these stages and our own transport."""
    run(program, stages, Transport(_channels(channels_of(program.placement)), _SPEC), observers)


def settle(
    programs: Sequence[Program], passes: Passes, average: Callable[[Sequence[float]], float] = statistics.mean
) -> None:
    """Runs this rank's one of ``programs`` a few times, and corrects how long passes sleep.

    From call to return, by the ``average`` over each kind; a trial outside of a run would be quicker, for its code and
    data are still in the processor's caches.
    """
    program = programs[dist.get_rank()]
    for _ in range(_ROUNDS):
        stages = _Timed(passes, program)
        carry_out(program, stages)
        for kind, longer in stages.longer.items():
            passes.around[kind] += average(longer)
    passes.around[Kind.B] = passes.around[Kind.I]


@cache
def _channels(wanted: tuple[Channel, ...]) -> Channels:
    return make_channels([range(dist.get_world_size())], wanted)


@cache
def _collective_group() -> dist.ProcessGroup:
    return make_collective_group([range(dist.get_world_size())])


class SleepingStages(Stages):
    """The stages of one rank, as :class:`megatron.schedules.runtime.stage_interface.Stages` asks for them."""

    def __init__(self, passes: Passes, program: Program) -> None:
        self._passes, self._placement = passes, program.placement
        self._layers = {stage: Layers(passes, stage, Kind.I) for stage in program.placement.stages_of(program.rank)}
        if any(action.op in COLLECTIVES for action in program.actions):
            self._group = _collective_group()
        self._open: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def forward(
        self, stage: int, microbatch: int, activation: Tensor | None, *, split: bool, recompute: bool
    ) -> Tensor:
        x = torch.zeros(SHAPE) if activation is None else activation.requires_grad_()
        self._layers[stage].microbatch = microbatch
        output = self._layers[stage](x)
        self._open[stage, microbatch] = x, output
        return output

    def backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        found = self.backward_input(stage, microbatch, gradient)
        self.backward_weight(stage, microbatch)
        return found

    def backward_input(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        x, output = self._open.pop((stage, microbatch))
        self._layers[stage].microbatch = microbatch
        torch.autograd.backward(output.sum() if gradient is None else output, gradient)
        return x.grad

    def backward_weight(self, stage: int, microbatch: int) -> None:
        self._passes.run(Kind.W, stage, microbatch)

    def reduce_gradients(self, stage: int) -> None: ...

    def output_part(self, stage: int, microbatch: int, hidden: Tensor) -> None:
        self._passes.run(Kind.S, stage)

    def output_weight(self, stage: int, microbatch: int, weights: Tensor) -> None:
        self._passes.run(Kind.T, stage)

    def add_embedding(self, microbatch: int, gradient: Tensor) -> None: ...

    def collective(self, op: Op, microbatch: int) -> Callable[[], Tensor]:
        """Returns the messages of a real collective: hidden states, numbers for each token, and the token."""
        first, last = self._placement.rank_of[0], self._placement.rank_of[-1]
        hidden, tokens, words = torch.zeros(SHAPE), torch.zeros(SHAPE[:2]), torch.zeros(SHAPE[:2], dtype=torch.int64)
        every = [torch.zeros(3, *SHAPE[:2]) for _ in range(self._placement.ranks)]
        cast = partial(dist.broadcast, group=self._group)
        gather = partial(dist.all_gather, every, every[0].clone(), group=self._group)
        add = partial(dist.all_reduce, hidden, group=self._group)
        calls: dict[Op, list[Callable[[], object]]] = {
            Op.EMBED: [partial(cast, words, first), partial(dist.reduce, hidden, first, group=self._group)],
            Op.OUTPUT: [partial(cast, hidden, last), partial(cast, words, last)],
            Op.SUM: [gather, add],
            Op.WEIGH: [partial(cast, tokens, last)],
            Op.EMBED_BACK: [partial(cast, hidden, first)],
        }

        def chain() -> Tensor:
            for call in calls[op]:
                call()
            return tokens if op is Op.WEIGH else hidden

        return chain


class _Timed(SleepingStages):
    """The same; records by how many seconds each pass took too long."""

    def __init__(self, passes: Passes, program: Program) -> None:
        super().__init__(passes, program)
        self.longer: dict[Kind, list[float]] = defaultdict(list)

    def forward(
        self, stage: int, microbatch: int, activation: Tensor | None, *, split: bool, recompute: bool
    ) -> Tensor:
        with self._timing(Kind.F, stage):
            return super().forward(stage, microbatch, activation, split=split, recompute=recompute)

    def backward_input(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        with self._timing(Kind.I, stage):
            return super().backward_input(stage, microbatch, gradient)

    def backward_weight(self, stage: int, microbatch: int) -> None:
        with self._timing(Kind.W, stage):
            super().backward_weight(stage, microbatch)

    def output_part(self, stage: int, microbatch: int, hidden: Tensor) -> None:
        with self._timing(Kind.S, stage):
            super().output_part(stage, microbatch, hidden)

    def output_weight(self, stage: int, microbatch: int, weights: Tensor) -> None:
        with self._timing(Kind.T, stage):
            super().output_weight(stage, microbatch, weights)

    @contextmanager
    def _timing(self, kind: Kind, stage: int) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self.longer[kind].append(time.monotonic() - begin - self._passes.seconds(kind, stage))
