"""Pipeline schedules for stock Megatron-LM that let you choose how much activation memory to use.

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


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


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
    verify: bool = False,
) -> None:
    """Gives the training loop of this process the schedules of this package.

    Call it once, at the top of the script: in a script of Megatron-LM's before Megatron parses its arguments, in any
    other loop on megatron-core before the model is built and before anything imports
    ``forward_backward_pipelining_without_interleaving`` by name. Without a schedule Megatron is unchanged. A wrong
    setting ends the process with one line and status 2, as soon as it can be known.

    Raises:
        ModuleNotFoundError: torch or megatron-core is not installed.

    Args:
        schedule, memory_limit, costs, layers, save_memory, vocabulary_parallel, plan_lengths, measure, replan, verify:
            what the flag of that name takes, behind ``--pipeline-``. Megatron-LM's scripts have these flags too, and
            flags go before arguments. Without an argument the environment variable of that name counts, such as
            ``PIPELINE_MEMORY_LIMIT``.
    """
    arguments = dict(locals())
    from megatron.schedules.integration.flags.checks import refuse_early
    from megatron.schedules.integration.flags.declared import settings_without_flags

    if "megatron.core" not in sys.modules or "pipeline_schedule" in settings_without_flags(arguments):
        refuse_early(sys.argv[1:], arguments=arguments)
    try:
        from megatron.schedules.integration import hooks
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing == "torch" or missing.startswith("megatron.core"):
            how = """run pip install ".[megatron]" in this package's folder (docs/getting-started.md)"""
            raise ModuleNotFoundError(f"training needs {missing}, which is missing: {how}", name=missing) from None
        if not missing.startswith("megatron.training"):
            raise
        from megatron.schedules.integration import core_hooks

        core_hooks.install(arguments)
    else:
        hooks.install(arguments)


def without_gpu() -> None:
    """On a machine without CUDA, have Megatron run on the CPU, for tests and demos; elsewhere do nothing.

    Call it before Megatron is imported. Give the job ``--distributed-backend gloo --transformer-impl local`` and what
    else of Megatron's needs no CUDA kernel: layers are Megatron's local ones.

    Raises:
        RuntimeError: Megatron was imported before and holds kernels to compile for CUDA.
    """
    from megatron.schedules.integration.cpu import standin

    if standin.needed():
        standin.enable()
