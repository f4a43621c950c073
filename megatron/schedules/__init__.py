"""Pipeline schedules whose activation memory is a choice, for stock Megatron-LM.

Importing this package imports neither torch nor Megatron; :func:`install` does, when it is called. Nor does it import
the planner: :func:`plan` and :func:`compare` come with it when they are first asked for.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.schedules.api import Plan, compare, plan
    from megatron.schedules.utils.errors import PlanError

__version__ = "0.2.0"
__all__ = ["Plan", "PlanError", "compare", "install", "plan", "without_gpu"]


def __getattr__(name: str) -> Any:
    if name not in ("Plan", "PlanError", "compare", "plan"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatron.schedules import api

    return getattr(api, name)


def install(
    *,
    schedule: str | None = None,
    memory_limit: float | str | None = None,
    costs: str | None = None,
    layers: str | None = None,
    save_memory: str | None = None,
    vocabulary_parallel: bool = False,
    plan_lengths: bool = False,
    measure: str | None = None,
    replan: bool = False,
) -> None:
    """Gives the running Megatron training script ``--pipeline-schedule`` and the schedules behind it.

    Call it once, at the top of the script, before Megatron parses its arguments. Without the flag and without
    ``schedule`` Megatron behaves as it does without this package. Where a flag of ours is wrong the process ends here,
    with one line and status 2; where that takes Megatron to tell, when the arguments are parsed.

    Args:
        schedule, memory_limit, costs, layers, save_memory, vocabulary_parallel, plan_lengths, measure, replan: what the
            flag of that name takes, behind ``--pipeline-``. Flags of the command line go before them.
    """
    given = {name: value for name, value in locals().items() if value not in (None, False)}
    for name, value in given.items():
        flag = f"--pipeline-{name.replace('_', '-')}"
        if not any(each == flag or each.startswith(f"{flag}=") for each in sys.argv):
            sys.argv += [flag] if value is True else [flag, str(value)]
    if "megatron.training" not in sys.modules:
        from megatron.schedules.integration.flags.early import refuse_early

        refuse_early(sys.argv[1:])
    from megatron.schedules.integration import hooks

    hooks.install()


def without_gpu() -> None:
    """On a machine without CUDA, have Megatron run on the CPU, for tests and demos; elsewhere do nothing.

    Call it before Megatron is imported. Give the job ``--distributed-backend gloo --transformer-impl local`` and what
    else of Megatron's needs no CUDA kernel.

    Raises:
        RuntimeError: Megatron was imported before and holds kernels to compile for CUDA.
    """
    from megatron.schedules.integration.cpu import standin

    if standin.needed():
        standin.enable()
