"""Samples that are read one iteration ahead and handed out in the planned order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.rerun_state_machine import RerunDataIterator
from torch import Tensor


class ReadAhead:
    """Wraps the source of stock's iterator for one chunk. All other attributes are those of the source.

    Stock's iterator repeats its samples if an iteration is run again. So it must not see samples that are only read
    ahead.

    Args:
        samples: the source.
    """

    def __init__(self, samples: Iterator[Any]) -> None:
        self._samples = samples
        self._handed_out: deque[Any] = deque()
        self._read: deque[Any] = deque()
        self._reading = threading.Lock()

    def read(self, count: int) -> list[Any]:
        """Returns the next ``count`` samples after those being handed out, without consuming them; fewer at the end."""
        with self._reading:
            while len(self._read) < count:
                try:
                    self._read.append(next(self._samples))
                except StopIteration:
                    break
            return [self._read[at] for at in range(min(count, len(self._read)))]

    def hand_out(self, order: Sequence[int]) -> None:
        """Hands out the next ``len(order)`` samples in that order, or in their original order if there are fewer."""
        missing = len(self.read(len(order))) < len(order)
        with self._reading:
            if not missing:
                samples = [self._read.popleft() for _ in order]
                self._handed_out.extend(samples[m] for m in order)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._handed_out:
            return self._handed_out.popleft()
        with self._reading:
            return self._read.popleft() if self._read else next(self._samples)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._samples, name)


def under(iterator: Any) -> ReadAhead:
    """Returns the wrapper below ``iterator``; inserts it on the first call.

    Raises:
        ValueError: ``iterator`` is not stock's.
    """
    if not isinstance(iterator, RerunDataIterator):
        raise ValueError(
            f"--pipeline-plan-lengths reads ahead under Megatron's own iterators, not {type(iterator).__name__}: "
            "leave the flag out"
        )
    if not isinstance(iterator.iterable, ReadAhead):
        iterator.iterable = ReadAhead(iterator.iterable)
    return iterator.iterable


def lengths_of(sample: Any) -> list[int]:
    """Lengths of the sequences of one microbatch from the data loader.

    Args:
        sample: has ``cu_seqlens``, shape (rows, bounds): each row's sequence bounds, padded with the last one; or
            ``tokens`` or another tensor of shape (rows, length), where each row is one sequence.

    Raises:
        ValueError: the sample has none of these.
    """
    bounds = sample.get("cu_seqlens") if isinstance(sample, dict) else None
    if isinstance(bounds, Tensor):
        steps = bounds.reshape(-1, bounds.shape[-1]).diff(dim=-1)
        return [int(step) for step in steps.flatten().tolist() if step > 0]
    for name in ("tokens", "labels", "position_ids"):
        tensor = sample.get(name) if isinstance(sample, dict) else None
        if isinstance(tensor, Tensor) and tensor.dim() == 2:
            rows, length = tensor.shape
            return [int(length)] * int(rows)
    raise ValueError(
        "--pipeline-plan-lengths: samples have neither cu_seqlens nor tokens, which tell their lengths: leave the flag "
        "out"
    )
