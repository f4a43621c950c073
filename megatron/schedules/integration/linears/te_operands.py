"""Transformer Engine's operands between I and W: FP8 copies, of which one is freed, and memory that is shared.

A quantized tensor of Transformer Engine has its numbers by rows, by columns, or both. W multiplies columns. With one
scale for the whole tensor, columns can be made from rows, and on Blackwell rows serve for both. With a scale for each
block the two copies are different numbers. Transformer Engine gathers rows if there is one scale, otherwise columns.

Userbuffers overlap a tensor-parallel message with a matrix product. Every product of a kind of linear has one buffer in
shared memory, which all layers use in turn, so nothing in it may be read after the backward of the linear that filled
it. What each setting of Megatron's does:

- ``tp_comm_overlap_ag``, forward: the gathered input lies in a buffer. Saved for W is this rank's part, in own memory.
- ``tp_comm_overlap_ag``, backward of a row parallel linear: the gathered gradient of the output lies in a buffer. It is
  copied, if W needs more of it than this rank's part.
- ``tp_comm_overlap_rs``, ``tp_comm_overlap_rs_dgrad``: the product lies in a buffer, which is read at once.
- ``tp_comm_bulk_dgrad``: the input for the weight gradient is gathered behind the product of the input gradient. It is
  off, because W comes later and gathers its input itself.
- ``tp_comm_bulk_wgrad``: the input gradient is reduced behind the product of the weight gradient. It is off, because
  that product comes later; the input gradient is reduced as without Userbuffers.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.schedules.integration.gpu_libraries import ENGINE
from megatron.schedules.integration.linears.products import Product

BULK = ("ub_bulk_dgrad", "ub_bulk_wgrad")
"""Attributes of a linear for the overlaps that are off in a split backward."""

# Parts of quantized operands that are gathered in a buffer. Transposed copies and scales never are.
_GATHERED = ("_data", "_rowwise_data", "_columnwise_data")


def is_quantized(operand: Any) -> bool:
    """Returns whether ``operand`` is a quantized tensor, or the smaller object that modules use for one.

    False for grouped tensors of experts (from 2.17 on) and for tensors that its debugging tools inspect; they are
    unchanged.
    """
    if type(operand) is Tensor:  # most are, and an attribute that is not there takes long to look for
        return False
    return hasattr(operand, "update_usage") and (hasattr(operand, "_data") or hasattr(operand, "_rowwise_data"))


def is_primary(weight: Any) -> bool:
    """Returns whether Transformer Engine stores a module's weight in FP8 or FP4 only, as with ``--fp8-param-gather``.

    False for subclasses of Megatron's, which are sharded.
    """
    return is_quantized(weight) and type(weight).__module__.startswith(f"{ENGINE}.tensor.")


def leaf_of(weight: Any) -> Any:
    """Returns a leaf with the memory of ``weight``, a parameter of any kind, and without its hooks.

    I reads a primary weight by columns. Before version 2.16 that copy is made by the first backward of an iteration,
    here by its first forward, so that all leaves share one.
    """
    if is_primary(weight):
        weight.update_usage(columnwise_usage=True)
    return weight.detach().requires_grad_()


def keep_columns(operand: Any) -> None:
    """Frees the copy by rows of a tensor, or of each in a list, after making the copy by columns if it is missing.

    Plain tensors do not change.
    """
    if isinstance(operand, (list, tuple)):
        for tensor in operand:
            keep_columns(tensor)
    elif is_quantized(operand):
        operand.update_usage(rowwise_usage=False, columnwise_usage=True)


def keep_rows(operand: Any) -> None:
    """Frees the copy by columns. Plain tensors do not change."""
    if is_quantized(operand):
        operand.update_usage(rowwise_usage=True, columnwise_usage=False)


def gathered_by_columns(operand: Any) -> bool:
    """Returns whether a gather uses the copy by columns, as it does for block scales."""
    return is_quantized(operand) and not hasattr(operand, "_transpose_invalid")


def gather(part: Any, group: ProcessGroup) -> tuple[Any, Any]:
    """Starts gathering the rows of all ranks; returns them and the communication to wait for, or None."""
    if not is_quantized(part):
        return Product.gathered(part, group)
    columns = gathered_by_columns(part)
    quantizer = copy.copy(part._quantizer)
    quantizer.set_usage(rowwise=not columns, columnwise=columns)
    engine = importlib.import_module("transformer_engine.pytorch.distributed")
    whole, work = engine.gather_along_first_dim(part, group, async_op=True, quantizer=quantizer)
    return whole, work


def out_of_buffers(operand: Any) -> Any:
    """Returns ``operand`` in its own memory. A quantized operand is changed in place; others do not change."""
    if type(operand) is Tensor:
        return operand.clone()
    for name in _GATHERED:
        part = getattr(operand, name, None)
        if type(part) is Tensor:
            setattr(operand, name, part.clone())
    return operand


def autocast_now() -> Callable[[], AbstractContextManager[None]]:
    """Records the current quantization settings of linears; returns a function that restores them."""
    state = getattr(sys.modules.get("transformer_engine.pytorch.fp8"), "FP8GlobalStateManager", None)
    if state is None or not state.is_fp8_enabled():
        return nullcontext
    engine, recipe, group = sys.modules["transformer_engine.pytorch"], state.get_fp8_recipe(), state.get_fp8_group()
    return partial(engine.fp8_autocast, enabled=True, fp8_recipe=recipe, fp8_group=group)
