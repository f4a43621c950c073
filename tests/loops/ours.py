"""This package in a loop of another framework."""

from __future__ import annotations

from collections import Counter
from typing import Any

import megatron.schedules
from megatron.schedules.integration import schedule_function
from megatron.schedules.integration.model_stages import MegatronStages


def install(schedule: str | None, **settings: Any) -> Counter[str]:
    """Installs ``schedule``, unless it is None, and counts the passes that our engine then runs."""
    passes = counted_passes()
    if schedule:
        megatron.schedules.install(schedule=schedule, **settings)
    return passes


def counted_passes() -> Counter[str]:
    """Counts the passes that our engine runs from now on, by kind.

    "hidden" counts messages of experts with weight gradients behind them.
    """
    passes: Counter[str] = Counter()
    run, run_ahead = schedule_function.run, MegatronStages.run_ahead

    def counted(program: Any, *rest: Any) -> None:
        passes.update(str(action.op) for action in program.actions)
        run(program, *rest)

    def counted_message(*args: Any) -> None:
        passes["hidden"] += 1
        run_ahead(*args)

    schedule_function.run = counted
    MegatronStages.run_ahead = counted_message  # type: ignore[method-assign]
    return passes
