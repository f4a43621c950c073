"""Records which weight gradients run behind the messages of experts, in a job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.schedules.integration import expert_messages
from megatron.schedules.runtime.weight_gradients import WeightGradients


class Recorded(NamedTuple):
    """What one rank did.

    Args:
        behind: of each hidden message, how many weight gradients ran between its start and the wait for it.
        added: of each parameter, the stage and microbatch of each weight gradient, in the order in which they ran.
    """

    behind: list[int]
    added: dict[int, list[tuple[int, int]]]


class _Message:
    """A message that has started."""

    def __init__(self, work: Any, done: Callable[[], None]) -> None:
        self._work, self._done = work, done

    def wait(self) -> None:
        self._done()
        self._work.wait()


def recorded() -> Recorded:
    """Begins to record in this process, which may train once afterwards."""
    found, travelling = Recorded([], {}), [0]
    take, exchanged = WeightGradients._take, expert_messages._exchanged
    send = torch.distributed.all_to_all_single

    def taking(store: WeightGradients, item: Any) -> Any:
        for parameter in item.parameters:
            found.added.setdefault(id(parameter), []).append(item._key)
        if item.parameters and travelling[0]:
            found.behind[-1] += 1
        return take(store, item)

    def sending(*args: Any, async_op: bool = False, **named: Any) -> Any:
        work = send(*args, async_op=async_op, **named)
        if not (async_op and travelling[0] < 0):
            return work
        travelling[0] = 1
        found.behind.append(0)
        return _Message(work, lambda: travelling.__setitem__(0, 0))

    def exchanging(*args: Any) -> Tensor:
        travelling[0] = -1
        result = exchanged(*args)
        assert travelling == [0], "the message was waited for"
        return result

    WeightGradients._take = taking  # type: ignore[method-assign]
    torch.distributed.all_to_all_single = sending
    expert_messages._exchanged = exchanging
    return found
