"""Pipeline schedules whose activation memory is a choice, for stock Megatron-LM.

Importing this package imports neither torch nor Megatron; :func:`install` does, when it is called.
"""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = ["install"]


def install() -> None:
    """Give the running Megatron training script ``--pipeline-schedule`` and the schedules behind it.

    Call it once, at the top of the script, before Megatron parses its arguments. Without the flag Megatron behaves as
    it does without this package.
    """
    from megatron.schedules.integration import hooks

    hooks.install()
