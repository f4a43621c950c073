"""Makes a rank's job plan again in known iterations, for tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from megatron.training import get_args

from megatron.schedules.integration import schedule_function
from megatron.schedules.integration.model_stages import MegatronStages
from megatron.schedules.planner.background import BackgroundPlan
from megatron.schedules.planner.registry import plan
from megatron.schedules.planner.replanning import Expected, Proposal
from megatron.schedules.planner.request import Request
from megatron.schedules.runtime import replanner
from megatron.schedules.runtime.planner import Planner
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.text_forms import to_csv


def programs_run() -> list[str]:
    """Of each training program from now on, its actions."""
    found: list[str] = []
    run = schedule_function.run

    def watched(program: Any, stages: Any, *args: Any) -> None:
        if any(work.op in ("I", "B") for work in program.actions):
            found.append(" ".join(map(str, program.actions)))
        run(program, stages, *args)

    schedule_function.run = watched
    return found


def propose_at_once(*names: str) -> None:
    """Whatever is asked for, the first of these schedules that does not run is proposed, without a process."""

    class AtOnce:
        def __init__(self, request: Request, current: Schedule, seconds: float) -> None:
            plans = [plan(Request(name, request.ranks, request.microbatches, request.costs)) for name in names]
            found = next(other for other in plans if other.order != current.order)
            assert found.placement == current.placement
            self._found = Proposal(Expected(20.0, 0.2), Expected(10.0, 0.1), to_csv(found))

        def poll(self) -> Proposal:
            return self._found

        def close(self) -> None: ...

    replanner.BackgroundPlan = AtOnce  # type: ignore[assignment,misc]


def wait_for_plans() -> None:
    """The process that plans is waited for, so that it is done in the iteration in which it began."""
    poll: Callable[[BackgroundPlan], Proposal | None] = BackgroundPlan.poll

    def waited(self: BackgroundPlan) -> Proposal:
        while (found := poll(self)) is None:
            time.sleep(0.02)
        return found

    BackgroundPlan.poll = waited  # type: ignore[method-assign]


def never_plan() -> None:
    """No plan is ever made."""
    BackgroundPlan.poll = lambda self: None  # type: ignore[method-assign]


def slow_from(iteration: int, seconds: float) -> None:
    """This rank's forwards take so much longer from ``iteration`` on."""
    forward = MegatronStages.forward

    def slow(*args: Any, **named: Any) -> Any:
        if get_args().curr_iteration + 1 >= iteration:
            time.sleep(seconds)
        return forward(*args, **named)

    MegatronStages.forward = slow  # type: ignore[method-assign]


def fail_to_prove() -> None:
    """This rank cannot make its programs."""

    def prove(*args: Any) -> Any:
        raise MemoryError("no room for programs")

    Planner.prove = prove  # type: ignore[method-assign]
