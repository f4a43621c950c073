"""One rank of a training job, whose steps take turns with those of all other ranks and jobs.

While it runs a step it is alone: no other process works, and no message comes. So what a step takes depends neither on
other ranks' work on the same cores nor on gloo's threads, and jobs can be compared step by step, a moment apart.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from multiprocessing.synchronize import Semaphore
from typing import Any, NamedTuple

from benchmarks.apart import tell_megatron
from megatron.schedules.runtime.frame_stack import with_frame_room

WARM_UP = 2
# What a step may need another rank for.
_MESSAGES = ("send", "recv", "allreduce", "broadcast")
_MOST_S = 300.0


class Turn(NamedTuple):
    """When a rank runs a step, and whom it lets run after it."""

    own: Semaphore
    following: Semaphore


def seconds_of_steps(flags: Sequence[str], turns: Sequence[Turn]) -> list[float]:
    """Trains; returns the processor time of each step behind the warm-up, of the thread that runs it.

    The mode with which the stand-in for a GPU sees each torch call is off in a step, since no job on a GPU has one. It
    takes a fifth of a step, and more of stock's than of ours. Steps of stock's have room for frames as ours have, or
    the depth of this function would decide which of them maps memory in every layer.

    Args:
        flags: of ``pretrain_gpt.py``.
        turns: of the ranks of this job.

    Raises:
        RuntimeError: the turn does not come: another rank has failed.
    """
    import torch
    import torch.distributed as dist
    from megatron.training import training

    import pretrain_gpt

    tell_megatron()
    _replace_calls_with_a_device()
    seconds: list[float] = []
    step, turn, number = training.train_step, turns[dist.get_rank()], count()

    @with_frame_room
    def stepped(*args: Any, **kwargs: Any) -> Any:
        if next(number) < WARM_UP:
            return step(*args, **kwargs)
        if not turn.own.acquire(timeout=_MOST_S):
            raise RuntimeError("another rank or job has not ended its step")
        with _empty_messages(), torch._C.DisableTorchFunction():
            begun = time.thread_time()
            found = step(*args, **kwargs)
            seconds.append(time.thread_time() - begun)
        turn.following.release()
        return found

    training.train_step = stepped
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
