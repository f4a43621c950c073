"""Sends the losses of multi-token prediction to the rank where stock Megatron reports them.

Stock keeps them where they are computed, with the output layer, and reports those of the last pipeline rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

_SUMS = ("loss_values", "correct_values", "total_values")


def hand_over_metrics(group: dist.ProcessGroup, source: int, layers: int) -> None:
    """Moves the sums that pipeline rank ``source`` has gathered since the last report to the last rank.

    Args:
        group: the pipeline's process group; all of it must call.
        source: the rank in it that computes the losses.
        layers: how many tokens ahead are predicted, ``--mtp-num-layers``.
    """
    tracker, last = MTPLossLoggingHelper.tracker, group.size() - 1
    sums = torch.zeros(len(_SUMS), layers, device="cuda")
    if group.rank() == source:
        for row, name in zip(sums, _SUMS, strict=True):
            row.copy_(tracker[name])
            tracker[name].zero_()
    dist.broadcast(sums, group_src=source, group=group)
    if group.rank() == last:
        for row, name in zip(sums, _SUMS, strict=True):
            tracker[name] = tracker.get(name, 0) + row
        tracker["reduce_group"] = None
        tracker["avg_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
