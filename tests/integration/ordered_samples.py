"""The order of microbatches: as ours plans it, noted; as stock is given it; and what is read ahead to plan it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, count, islice
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.training import training

from megatron.schedules.integration import hooks
from megatron.schedules.integration.lengths.beside import LengthsBeside
from megatron.schedules.integration.lengths.read_ahead import lengths_of, under


def note(seen: list[tuple[int, ...]]) -> None:
    """Write down the order of each iteration that is planned for lengths.

    Attention takes as much as in a long context: in that of these small models it takes so little that hardly any other
    order would be shorter.
    """
    hooks.attention_of = lambda args: (0.6, 0.75)
    begin = LengthsBeside.begin

    def noting(self: Any, iterators: Any, sizes: Any) -> Any:
        planned = begin(self, iterators, sizes)
        seen.append(tuple(range(sizes.microbatches)) if planned is None else planned.order)
        return planned

    LengthsBeside.begin = noting


def put_in_place(orders: Sequence[Sequence[Sequence[int]]]) -> None:
    """Give the training iterations their samples in ``orders``: for each rank, that of each iteration."""
    train_step, iterations = training.train_step, count()

    def ordered(forward_step: Any, data_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        order = orders[dist.get_rank()][next(iterations)]
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        for each in iterators:
            if each is not None:
                samples = list(islice(each.iterable, len(order)))
                each.iterable = chain([samples[m] for m in order], each.iterable)
        return train_step(forward_step, data_iterator, *args, **kwargs)

    training.train_step = ordered


def reads_ahead() -> dict[str, Any]:
    """What an iterator hands out that is read ahead of, and the lengths that samples tell."""
    iterator = RerunDataIterator(iter(range(10)))
    next(iterator)
    below = under(iterator)
    found: dict[str, Any] = {"read": [below.read(4), below.read(3)], "same": under(iterator) is below}
    below.hand_out([2, 0, 1])
    found["upcoming"] = below.read(2)
    found["handed out"] = [next(iterator) for _ in range(5)]
    found["at the end"] = below.read(9)
    found["after it"] = list(islice(below, 9))
    bounds = torch.tensor([[0, 3, 7, 16, 16, 16]])
    samples = [
        {"tokens": torch.zeros(1, 16), "cu_seqlens": bounds},
        {"tokens": torch.zeros(2, 12), "cu_seqlens": None},
        {"labels": torch.zeros(1, 5)},
    ]
    found["lengths"] = [lengths_of(sample) for sample in samples]
    for name, call in {"other samples": lambda: lengths_of((1, 2)), "other iterators": lambda: under(iter(()))}.items():
        try:
            call()
        except ValueError as error:
            found[name] = str(error)
    return found
