"""Pipeline schedules whose activation memory is a choice, for stock Megatron-LM.

Importing this package imports neither torch nor Megatron; :func:`install` does, when it is called.
"""

from __future__ import annotations

import sys

__version__ = "0.1.0"
__all__ = ["install", "without_gpu"]


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
