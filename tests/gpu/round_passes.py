"""Calls a watcher round every pass of a real training job, inside of what the engine does for messages.

The engine's observer is told of a pass before its input is waited for, and staged where it comes through the host;
here the input is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from megatron.schedules.integration import schedule_function
from megatron.schedules.programs.program import Action, Op, Program
from megatron.schedules.runtime.engine import Observer
from megatron.schedules.runtime.position import PositionTracker
from megatron.schedules.runtime.stage_interface import Stages
from megatron.schedules.runtime.transport import Transport
from megatron.schedules.schedule.kinds import Kind


class Watcher(Protocol):
    """A watcher on one rank."""

    def program(self, program: Program) -> AbstractContextManager[Any]:
        """Entered for one iteration's program."""
        ...

    def action(self, action: Action) -> AbstractContextManager[Any]:
        """Entered for one pass, or for starting a reduction."""
        ...

    @property
    def found(self) -> Any:
        """Returns what it saw, once the job has ended; can be pickled."""
        ...


def watch(watcher: Watcher) -> None:
    """Calls ``watcher`` for every program of this process."""
    run = schedule_function.run

    def watched(
        program: Program,
        stages: Stages,
        transport: Transport,
        observers: Sequence[Observer] = (),
        tracker: PositionTracker | None = None,
    ) -> None:
        with watcher.program(program):
            run(program, _Watched(stages, watcher.action), transport, observers, tracker)

    schedule_function.run = watched


class _Watched:
    """Stages with a context entered round each of their methods."""

    def __init__(self, stages: Stages, around: Callable[[Action], AbstractContextManager[Any]]) -> None:
        self._stages, self._around = stages, around

    def forward(
        self, stage: int, microbatch: int, activation: Tensor | None, *, split: bool, recompute: bool
    ) -> Tensor | None:
        with self._around(Action(Kind.F, stage, microbatch)):
            return self._stages.forward(stage, microbatch, activation, split=split, recompute=recompute)

    def backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        with self._around(Action(Kind.B, stage, microbatch)):
            return self._stages.backward(stage, microbatch, gradient)

    def backward_input(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        with self._around(Action(Kind.I, stage, microbatch)):
            return self._stages.backward_input(stage, microbatch, gradient)

    def backward_weight(self, stage: int, microbatch: int) -> None:
        with self._around(Action(Kind.W, stage, microbatch)):
            self._stages.backward_weight(stage, microbatch)

    def recompute_forward(self, stage: int, microbatch: int) -> None:
        with self._around(Action(Kind.R, stage, microbatch)):
            self._stages.recompute_forward(stage, microbatch)

    def reduce_gradients(self, stage: int) -> None:
        with self._around(Action(Op.REDUCE, stage, 0)):
            self._stages.reduce_gradients(stage)

    def offload(self, stage: int, microbatch: int) -> None:
        with self._around(Action(Kind.O, stage, microbatch)):
            self._stages.offload(stage, microbatch)

    def load(self, stage: int, microbatch: int) -> None:
        with self._around(Action(Kind.L, stage, microbatch)):
            self._stages.load(stage, microbatch)

    def output_part(self, stage: int, microbatch: int, hidden: Tensor) -> None:
        with self._around(Action(Kind.S, stage, microbatch)):
            self._stages.output_part(stage, microbatch, hidden)

    def output_weight(self, stage: int, microbatch: int, weights: Tensor) -> None:
        with self._around(Action(Kind.T, stage, microbatch)):
            self._stages.output_weight(stage, microbatch, weights)

    def add_embedding(self, microbatch: int, gradient: Tensor) -> None:
        self._stages.add_embedding(microbatch, gradient)

    def collective(self, op: Op, microbatch: int) -> Callable[[], Tensor | None]:
        return self._stages.collective(op, microbatch)
