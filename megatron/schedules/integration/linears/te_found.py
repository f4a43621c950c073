"""Which Transformer Engine there is here, and whether its linears can be split."""

from __future__ import annotations

import inspect
import sys
from importlib.util import find_spec

from megatron.schedules.integration.flags.later import TooEarlyError, after_megatron

ENGINE = "transformer_engine.pytorch"
LINEARS = ("Linear", "LayerNormLinear", "GroupedLinear")


def te_fault() -> str | None:
    """Why Transformer Engine's linears cannot be split here, a clause without a full stop; None where they can.

    Raises:
        TooEarlyError: where that can only be said once it is imported.
    """
    if ENGINE.partition(".")[0] not in sys.modules and find_spec(ENGINE.partition(".")[0]) is None:
        return "Transformer Engine is not installed"
    try:
        engine = after_megatron(ENGINE)
    except TooEarlyError:
        raise
    except ModuleNotFoundError:
        return "Transformer Engine is not installed"
    except Exception as error:  # it loads shared libraries and asks for devices, which fail in many ways
        return f"Transformer Engine cannot be imported here, which ends in {type(error).__name__}"
    for name in LINEARS:
        linear = getattr(engine, name, None)
        if linear is None or "delay_wgrad_compute" not in inspect.signature(linear.__init__).parameters:
            return (
                f"Transformer Engine {te_version()} has no {name} that can delay weight gradients, as 2.3 and later do"
            )
    return None


def te_version() -> str:
    """Which Transformer Engine is imported."""
    return str(getattr(sys.modules.get("transformer_engine"), "__version__", "of unknown version"))
