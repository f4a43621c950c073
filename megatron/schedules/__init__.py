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

__version__ = "0.1.0"
__all__ = ["Plan", "PlanError", "compare", "install", "plan", "without_gpu"]


def __getattr__(name: str) -> Any:
    if name not in ("Plan", "PlanError", "compare", "plan"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatron.schedules import api

    return getattr(api, name)


def install() -> None:
    """Give the running Megatron training script ``--pipeline-schedule`` and the schedules behind it.

    Call it once, at the top of the script, before Megatron parses its arguments. Without the flag Megatron behaves as
    it does without this package. Where a flag of ours is wrong the process ends here, with one line and status 2; where
    that takes Megatron to tell, when the arguments are parsed.
    """
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
