"""One rank of a training job, whose steps take turns with those of all other ranks and jobs.

While it has its turn it is alone: no other process works, and no message comes. So what a step takes depends neither on
other ranks' work on the same cores nor on gloo's threads. A turn ends at the next forward, since a shared machine is
faster in one moment than in the next: a step of each job then has its part of all of them. All ranks share a core: on
two, a turn would find in the cache more or less of what the rank's last one left, as chance has it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from multiprocessing import get_context
from random import SystemRandom
from typing import Any

from benchmarks.apart import tell_megatron
from megatron.schedules.runtime.frame_stack import with_frame_room

WARM_UP = 2
# What a step may need another rank for.
_MESSAGES = ("send", "recv", "allreduce", "broadcast")
_MOST_S = 300.0


class Turns:
    """Who works: one rank of one job at a time, in rounds of all whose step has not ended.

    Each round has another order by chance: what a rank needs may lie in the cache, where it follows one like itself.

    Args:
        ranks: of all jobs together. The first one has the first turn.
    """

    def __init__(self, ranks: int) -> None:
        context = get_context("fork")
        self._turns = [context.Semaphore(number == 0) for number in range(ranks)]
        self._ended, self._served = context.RawArray("b", ranks), context.RawArray("b", ranks)

    def wait(self, number: int) -> None:
        """Returns where rank ``number`` has its turn.

        Raises:
            RuntimeError: the turn does not come: another rank has failed.
        """
        if not self._turns[number].acquire(timeout=_MOST_S):
            raise RuntimeError("another rank or job has not ended its turn")

    def pass_on(self, number: int, ended: bool) -> None:
        """Lets another rank work. One whose step has ``ended`` gets no turn until all others' have."""
        self._served[number], self._ended[number] = True, ended
        if all(self._ended):
            self._ended[:] = bytes(len(self._ended))
        if not self._waiting():
            self._served[:] = self._ended[:]
        self._turns[SystemRandom().choice(self._waiting())].release()

    def _waiting(self) -> list[int]:
        return [number for number, served in enumerate(self._served) if not served]


class Watch:
    """Counts the processor time that a step takes in its turns.

    Args:
        number: of this rank in ``turns``.
    """

    def __init__(self, turns: Turns, number: int) -> None:
        self._turns, self._number, self._seconds = turns, number, 0.0
        self._begun: float | None = None  # the turn, within a step

    def begin(self) -> None:
        """Waits for a turn in which a step begins or goes on."""
        self._turns.wait(self._number)
        self._begun = time.thread_time()

    def pause(self) -> None:
        """Lets others work before the step goes on, if one is counted."""
        if self._begun is not None:
            self._seconds += time.thread_time() - self._begun
            self._turns.pass_on(self._number, ended=False)
            self.begin()

    def end(self) -> float:
        """Ends the step; returns its seconds."""
        assert self._begun is not None, "a step has begun"
        seconds, self._seconds, self._begun = self._seconds + time.thread_time() - self._begun, 0.0, None
        self._turns.pass_on(self._number, ended=True)
        return seconds


def seconds_of_steps(flags: Sequence[str], watches: Sequence[Watch]) -> list[float]:
    """Trains; returns the processor time of each step behind the warm-up, of the thread that runs it.

    The mode with which the stand-in for a GPU sees each torch call is off in a step, since no job on a GPU has one. It
    takes a fifth of a step, and more of stock's than of ours. Steps of stock's have room for frames as ours have, or
    the depth of this function would decide which of them maps memory in every layer.

    Args:
        flags: of ``pretrain_gpt.py``.
        watches: of the ranks of this job.

    Raises:
        RuntimeError: the turn does not come: another rank has failed.
    """
    import torch
    import torch.distributed as dist
    from megatron.training import training

    import pretrain_gpt
    from megatron.schedules.integration import gpt

    tell_megatron()
    _replace_calls_with_a_device()
    seconds: list[float] = []
    step, forward, number = training.train_step, gpt.forward_step, count()
    watch = watches[dist.get_rank()]

    @with_frame_room
    def stepped(*args: Any, **kwargs: Any) -> Any:
        if next(number) < WARM_UP:
            return step(*args, **kwargs)
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        watch.begin()
        with _empty_messages(), torch._C.DisableTorchFunction():
            found = step(*args, **kwargs)
        seconds.append(watch.end())
        return found

    def forward_step(data_iterator: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        watch.pause()
        return forward(data_iterator, model)

    training.train_step, gpt.forward_step = stepped, forward_step
    sys.argv = ["pretrain_gpt.py", *flags]
    pretrain_gpt.main()
    return seconds


@contextmanager
def _empty_messages() -> Iterator[None]:
    """Messages to other ranks end at once, and what is received is zero."""
    import torch.distributed as dist

    kept = {name: vars(dist.ProcessGroup)[name] for name in _MESSAGES}
    for name in _MESSAGES:
        setattr(dist.ProcessGroup, name, _empty(name, getattr(dist.ProcessGroup, name)))
    try:
        yield
    finally:
        for name, stock in kept.items():
            setattr(dist.ProcessGroup, name, stock)


def _empty(name: str, stock: Any) -> Any:
    def message(group: Any, tensors: Any, *args: Any) -> Any:
        if group.size() == 1:
            return stock(group, tensors, *args)
        if name == "recv":
            tensors[0].detach().zero_()
        return _DONE

    return message


class _Done:
    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


_DONE = _Done()


def _replace_calls_with_a_device() -> None:
    """Takes the stand-in's mode out of backwards, and makes calls that name a CUDA device work without it."""
    import torch
    from torch.autograd.function import BackwardCFunction

    from megatron.schedules.integration.cpu.standin import cuda_type, making_on_cpu

    BackwardCFunction.apply = BackwardCFunction.apply.__wrapped__  # type: ignore[method-assign, attr-defined]

    for name in ("empty", "ones", "tensor", "zeros"):
        setattr(torch, name, making_on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor  # type: ignore[method-assign]
    stock = torch.Tensor.type
    torch.Tensor.type = lambda *args, **kwargs: cuda_type(stock, args, kwargs)  # type: ignore[method-assign]
