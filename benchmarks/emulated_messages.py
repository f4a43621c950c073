"""Messages of experts on a thread of their own, in passes that sleep; weight gradients run behind them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Event, Thread

import torch.distributed as dist
from torch import Tensor

from benchmarks.emulated_ours import SleepingStages, carry_out
from benchmarks.emulated_passes import Passes
from megatron.schedules.programs.program import Program
from megatron.schedules.runtime.behind_messages import ComingWeights
from megatron.schedules.schedule.kinds import Kind

_PIECES = 16
"""Single weight gradients of a W, as of 16 linear layers."""

Behind = Callable[[float, float], float]
"""Computes from a moment on, for about as many seconds as given; returns when it ends, by :func:`time.monotonic`."""


class Waiting:
    """Passes in the middle of which a message starts and is waited for.

    Args:
        behind: what runs meanwhile.
    """

    def __init__(self, behind: Behind) -> None:
        self._behind = behind
        self._sent: SimpleQueue[tuple[float, Event]] = SimpleQueue()
        Thread(target=self._travel, daemon=True).start()

    def __call__(self, seconds: float, message: float) -> None:
        """Takes ``seconds``, of which a message travels for ``message``; more if what runs behind it takes longer."""
        begin, alone = time.monotonic(), max(seconds - message, 0.0) / 2
        if not message:
            sleep_until(begin + seconds)
            return
        sleep_until(start := begin + alone)
        arrived = Event()
        self._sent.put((start + message, arrived))
        end = self._behind(start, message)
        arrived.wait()
        # A late wake-up of a thread is no work.
        sleep_until(max(start + message, end) + alone)

    def _travel(self) -> None:
        while True:
            arrival, arrived = self._sent.get()
            sleep_until(arrival)
            arrived.set()


def exposed(start: Callable[[Passes], Callable[[], None]]) -> Callable[[Passes], Callable[[], None]]:
    """Returns ``start`` for passes that compute nothing while they wait for messages."""

    def started(passes: Passes) -> Callable[[], None]:
        passes.waits = Waiting(lambda start, seconds: start)
        return start(passes)

    return started


def start(programs: Sequence[Program], passes: Passes) -> Callable[[], None]:
    """Returns a function that runs this rank's one of ``programs`` once, with weight gradients behind messages."""
    program = programs[dist.get_rank()]
    stages = _HidingStages(passes, program)
    passes.waits = Waiting(stages.run_ahead)

    def once() -> None:
        stages.coming = ComingWeights(program)
        carry_out(program, stages)

    return once


class _HidingStages(SleepingStages):
    """Stages whose weight gradients run in pieces behind messages, as in training; W does the rest.

    The rule for how many is that of :meth:`.WeightGradients.run_ahead`.
    """

    def __init__(self, passes: Passes, program: Program) -> None:
        super().__init__(passes, program)
        self.coming = ComingWeights(program)
        self._left: defaultdict[tuple[int, int], int] = defaultdict(lambda: _PIECES)

    def run_ahead(self, start: float, seconds: float) -> float:
        """Computes single weight gradients that are due, for about ``seconds`` from ``start`` on."""
        end = start
        for stage, microbatch in self.coming.due():
            each = self._passes.seconds(Kind.W, stage, microbatch) * self._passes.pace / _PIECES
            while self._left[stage, microbatch]:
                if start + seconds - end < each / 2:
                    return end
                end += each
                self._left[stage, microbatch] -= 1
                sleep_until(end)
        return end

    def backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        found = super().backward_input(stage, microbatch, gradient)
        super().backward_weight(stage, microbatch)
        self.coming.ended(Kind.B, stage, microbatch)
        return found

    def backward_input(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        found = super().backward_input(stage, microbatch, gradient)
        self.coming.ended(Kind.I, stage, microbatch)
        return found

    def backward_weight(self, stage: int, microbatch: int) -> None:
        left = self._left.pop((stage, microbatch), _PIECES)
        self._passes.run_part(Kind.W, stage, microbatch, left / _PIECES)
        self.coming.ended(Kind.W, stage, microbatch)


def sleep_until(moment: float) -> None:
    """Sleeps until ``moment``, by :func:`time.monotonic`."""
    time.sleep(max(moment - time.monotonic(), 0.0))
