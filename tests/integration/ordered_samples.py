"""The order of microbatches: as ours plans it, noted; as stock is given it; and what is read ahead to plan it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, count, islice
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.rerun_state_machine import RerunDataIterator, destroy_rerun_state_machine
from megatron.training import training

import pretrain_gpt
from megatron.schedules.integration import loops
from megatron.schedules.integration.background_plans import BackgroundPlans, in_loaders_order, lengths_of, under


def note(seen: list[tuple[int, ...]]) -> None:
    """Write down the order of each iteration that is planned for lengths.

    Attention takes as much as in a long context: in that of these small models it takes so little that hardly any other
    order would be shorter.
    """
    loops.attention_of = lambda spec: (0.6, 0.75)
    begin = BackgroundPlans.begin

    def noting(self: Any, iterators: Any, sizes: Any) -> Any:
        planned = begin(self, iterators, sizes)
        seen.append(tuple(range(sizes.microbatches)) if planned is None else planned.order)
        return planned

    BackgroundPlans.begin = noting


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


def cut() -> None:
    """Have samples come from the data loader in different numbers and lengths of rows."""
    made, parse = RerunDataIterator.__init__, pretrain_gpt.parse_and_validate_args

    def init(self: Any, samples: Any) -> None:
        made(self, map(_cut, samples))

    def parse_and_validate_args(*args: Any, **kwargs: Any) -> Any:
        parsed = parse(*args, **kwargs)
        parsed.variable_seq_lengths = True  # stock has no flag for it, and turns it off when it validates
        return parsed

    RerunDataIterator.__init__, pretrain_gpt.parse_and_validate_args = init, parse_and_validate_args


def _cut(sample: dict[str, Any]) -> dict[str, Any]:
    number = int(sample["tokens"][0, 1])
    rows, length = 1 + number % 2, 4 * (1 + number % 4)
    return {
        name: value[:rows, :, :length, :length] if value.dim() == 4 else value[:rows, :length]
        for name, value in sample.items()
    }


def reads_ahead() -> dict[str, Any]:
    """What an iterator hands out that is read ahead of, and the lengths that samples tell."""
    try:
        return _read_ahead()
    finally:
        destroy_rerun_state_machine()  # made by the first question to it, and in the way of jobs that start from here


def _read_ahead() -> dict[str, Any]:
    iterator = RerunDataIterator(iter(range(10)))
    next(iterator)
    below = under(iterator)
    found: dict[str, Any] = {"read": [below.read(4), below.read(3)], "same": under(iterator) is below}
    below.hand_out([2, 0, 1])
    found["upcoming"] = below.read(2)
    found["handed out"] = [next(iterator) for _ in range(5)]
    below.hand_out([1, 0])
    found["not read before"] = [next(iterator), next(iterator)]
    below.hand_out([3, 2, 1, 0])  # of the two that are left
    found["at the end"] = below.read(9)
    found["after it"] = list(islice(below, 9))
    found["losses"] = in_loaders_order("cab", (2, 0, 1))
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
