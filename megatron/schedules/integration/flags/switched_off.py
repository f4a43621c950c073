"""Megatron's settings that are off under a schedule, because its passes do the same or need another order."""

from __future__ import annotations

from megatron.schedules.job.spec import JobSpec
from megatron.schedules.schedule.schedule import Schedule


def switched_off(spec: JobSpec, schedule: Schedule) -> list[str]:
    """Returns a sentence for each setting that is given and off. The modules of ``linears`` switch them off.

    Args:
        spec: the job.
        schedule: its plan.
    """
    given, found = spec.stock.given, []
    if "tp_comm_overlap" in given and schedule.splits and spec.stock.transformer_impl != "local":
        found.append(
            "--tp-comm-overlap: tp_comm_bulk_dgrad and tp_comm_bulk_wgrad are off, because they need the weight "
            "gradient right after the input gradient; these two messages are sent as without the flag"
        )
    if "defer_embedding_wgrad_compute" in given:
        found.append(
            "--defer-embedding-wgrad-compute is off: the output layer's weight gradient is computed with its input's"
        )
    return found
