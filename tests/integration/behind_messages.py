"""Records which weight gradients run behind the messages of experts, in a job."""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron.schedules.integration import expert_messages
from megatron.schedules.integration.model_stages import MegatronStages
from megatron.schedules.runtime.weight_gradients import WeightGradients


class Recorded(NamedTuple):
    """What one rank did.

    Args:
        behind: of each hidden message, how many weight gradients ran between its start and the wait for it.
        added: of each parameter, the stage and microbatch of each weight gradient, in the order in which they ran.
    """

    behind: list[int]
    added: dict[int, list[tuple[int, int]]]


def recorded() -> Recorded:
    """Begins to record in this process, which may train once afterwards."""
    found, ahead = Recorded([], {}), [False]
    take, run_ahead, behind = WeightGradients._take, MegatronStages.run_ahead, expert_messages._behind

    def taking(store: WeightGradients, item: Any) -> Any:
        for parameter in item.parameters:
            found.added.setdefault(id(parameter), []).append(item.key)
        if item.parameters and ahead[0]:
            found.behind[-1] += 1
        return take(store, item)

    def running_ahead(stages: MegatronStages, sent: int) -> None:
        found.behind.append(0)
        ahead[0] = True
        run_ahead(stages, sent)
        ahead[0] = False

    def hiding(start: Any, rows: Any, result: Any, run: Any) -> Any:
        messages = len(found.behind)

        def started(**named: Any) -> Any:
            assert named == {"async_op": True} and len(found.behind) == messages, "it starts first"
            return _Message(start(**named), found, messages)

        return behind(started, rows, result, run)

    WeightGradients._take = taking  # type: ignore[method-assign]
    MegatronStages.run_ahead = running_ahead  # type: ignore[method-assign]
    expert_messages._behind = hiding
    return found


class _Message:
    """A message that has started, the ``number``-th."""

    def __init__(self, work: Any, found: Recorded, number: int) -> None:
        self._work, self._found, self._number = work, found, number

    def wait(self) -> None:
        assert len(self._found.behind) == self._number + 1, "it is waited for last"
        self._work.wait()
