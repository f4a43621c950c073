"""Transformer Engine's Userbuffers under a split backward.

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

from typing import Any

from torch import Tensor

BULK = ("ub_bulk_dgrad", "ub_bulk_wgrad")
"""Attributes of a linear for the overlaps that are off in a split backward."""

# Parts of quantized operands that are gathered in a buffer. Transposed copies and scales never are.
_GATHERED = ("_data", "_rowwise_data", "_columnwise_data")


def out_of_buffers(operand: Any) -> Any:
    """Returns ``operand`` in memory of its own. A quantized one is changed, and any but these is returned as it is."""
    if type(operand) is Tensor:
        return operand.clone()
    for name in _GATHERED:
        part = getattr(operand, name, None)
        if type(part) is Tensor:
            setattr(operand, name, part.clone())
    return operand
