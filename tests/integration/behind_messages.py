"""Records which weight gradients run behind the messages of experts, in a job."""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron.schedules.integration import expert_messages
from megatron.schedules.runtime.weight_gradients import WeightGradients


class Recorded(NamedTuple):
    """What one rank did.

    Args:
        behind: of each hidden message, how many weight gradients ran between its start and the wait for it.
        calls: names of the functions of torch.distributed that sent them.
        added: of each parameter, the stage and microbatch of each weight gradient, in the order in which they ran.
    """

    behind: list[int]
    calls: set[str]
    added: dict[int, list[tuple[int, int]]]


def recorded() -> Recorded:
    """Begins to record in this process, which may train once afterwards."""
    found, messages = Recorded([], set(), {}), _Messages()
    take, behind = WeightGradients._take, expert_messages._behind

    def taking(store: WeightGradients, item: Any) -> Any:
        for parameter in item.parameters:
            found.added.setdefault(id(parameter), []).append(item._key)
        if item.parameters and messages.travelling:
            found.behind[-1] += 1
        return take(store, item)

    def hiding(start: Any, *rest: Any) -> Any:
        def started(**named: Any) -> Any:
            assert named == {"async_op": True} and not messages.travelling
            found.behind.append(0)
            found.calls.add(start.func.__name__)
            return messages.start(start(**named))

        result = behind(started, *rest)
        assert not messages.travelling, "the message was waited for"
        return result

    WeightGradients._take = taking  # type: ignore[method-assign]
    expert_messages._behind = hiding
    return found


class _Messages:
    """Knows whether a message travels."""

    def __init__(self) -> None:
        self.travelling: Any = None

    def start(self, work: Any) -> _Messages:
        self.travelling = work
        return self

    def wait(self) -> None:
        work, self.travelling = self.travelling, None
        work.wait()
