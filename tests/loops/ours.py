"""This package in a loop of another framework."""

from __future__ import annotations

from collections import Counter
from typing import Any

import megatron.schedules
from megatron.schedules.integration import schedule_function


def install(schedule: str | None, **settings: Any) -> Counter[str]:
    """Installs ``schedule``, unless it is None, and counts the passes that our engine then runs, by kind."""
    passes: Counter[str] = Counter()
    run = schedule_function.run

    def counted(program: Any, *rest: Any) -> None:
        passes.update(str(action.op) for action in program.actions)
        run(program, *rest)

    schedule_function.run = counted
    if schedule:
        megatron.schedules.install(schedule=schedule, **settings)
    return passes
