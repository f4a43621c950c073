"""Version of Transformer Engine, and a check that its linears can be split."""

from __future__ import annotations

import inspect
import sys

from megatron.schedules.integration.gpu_libraries import TRANSFORMER_ENGINE, is_there
from megatron.schedules.utils.late_imports import TooEarlyError, after_megatron

ENGINE = "transformer_engine.pytorch"
LINEARS = ("Linear", "LayerNormLinear", "GroupedLinear")
OLDEST = "2.3"
"""The first version in which all of these can delay their weight gradients."""


def te_fault() -> str | None:
    """Returns the reason why Transformer Engine's linears cannot be split, without a full stop; None if they can.

    Raises:
        TooEarlyError: Transformer Engine is not imported yet.
    """
    if not is_there(TRANSFORMER_ENGINE):
        return "Transformer Engine is not installed"
    try:
        engine = after_megatron(ENGINE)
    except TooEarlyError:
        raise
    except ModuleNotFoundError:
        return "Transformer Engine is not installed"
    except Exception as error:  # it loads shared libraries and queries devices, which can fail in many ways
        return f"Transformer Engine cannot be imported here, which ends in {type(error).__name__}"
    for name in LINEARS:
        linear = getattr(engine, name, None)
        if linear is None or "delay_wgrad_compute" not in inspect.signature(linear.__init__).parameters:
            return (
                f"Transformer Engine {te_version()} has no {name} that can delay weight gradients, "
                f"as {OLDEST} and later do"
            )
    return None


def te_version() -> str:
    """Returns the imported version."""
    return str(getattr(sys.modules.get("transformer_engine"), "__version__", "of unknown version"))
