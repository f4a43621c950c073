"""Bounds of Megatron's sizes, for training, dry runs and files of a model's flags."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.schedules.schedule.size_limits import MOST_RANKS
from megatron.schedules.utils.errors import PlanError

_PROCESSES = 10_000_000
_WIDTH = 10_000_000
_TOKENS = 1_000_000_000
# Searches place layers one by one.
MOST_LAYERS = 2000

# (least, most). The most is far above any model's, yet planning stays fast. 0 is allowed where it means "none".
BOUNDS = {
    "--context-parallel-size": (1, _PROCESSES),
    "--decoder-first-pipeline-num-layers": (0, MOST_LAYERS),
    "--decoder-last-pipeline-num-layers": (0, MOST_LAYERS),
    "--expert-model-parallel-size": (1, _PROCESSES),
    "--expert-tensor-parallel-size": (1, _PROCESSES),
    "--ffn-hidden-size": (1, _WIDTH),
    "--global-batch-size": (0, _TOKENS),
    "--hidden-size": (1, _WIDTH),
    "--kv-channels": (1, _WIDTH),
    "--kv-lora-rank": (1, _WIDTH),
    "--make-vocab-size-divisible-by": (1, _WIDTH),
    "--max-position-embeddings": (1, _TOKENS),
    "--micro-batch-size": (1, _WIDTH),
    "--moe-ffn-hidden-size": (1, _WIDTH),
    "--moe-router-topk": (1, 100_000),
    "--moe-shared-expert-intermediate-size": (0, _WIDTH),
    "--mtp-num-layers": (0, 100),
    "--num-attention-heads": (1, 1_000_000),
    "--num-distributed-optimizer-instances": (1, _PROCESSES),
    "--num-experts": (0, 100_000),
    "--num-layers": (1, MOST_LAYERS),
    "--num-layers-per-virtual-pipeline-stage": (1, MOST_LAYERS),
    "--num-query-groups": (1, 1_000_000),
    "--num-virtual-stages-per-pipeline-rank": (1, MOST_LAYERS),
    "--padded-vocab-size": (1, _TOKENS),
    "--pipeline-model-parallel-size": (1, MOST_RANKS),
    "--q-lora-rank": (1, _WIDTH),
    "--qk-head-dim": (1, _WIDTH),
    "--qk-pos-emb-head-dim": (1, _WIDTH),
    "--recompute-num-layers": (1, MOST_LAYERS),
    "--seq-length": (1, _TOKENS),
    "--tensor-model-parallel-size": (1, _PROCESSES),
    "--train-iters": (0, 1_000_000_000_000),
    "--v-head-dim": (1, _WIDTH),
    "--vocab-size": (1, _TOKENS),
    # Environment variables.
    "$LOCAL_RANK": (0, _PROCESSES - 1),
    "$LOCAL_WORLD_SIZE": (1, _PROCESSES),
    "$RANK": (0, _PROCESSES - 1),
    "$SLURM_NTASKS": (1, _PROCESSES),
    "$WORLD_SIZE": (1, _PROCESSES),
}


def within(name: str, value: int) -> int:
    """Returns ``value``.

    Raises:
        PlanError: where it is out of the bounds of ``name``.
    """
    least, most = BOUNDS[name]
    if value < least:
        raise PlanError(f"{name} must be {least} or more, not {value}")
    if value > most:
        raise PlanError(f"{name} must be {most} or less, not {value}")
    return value


def check_bounds(args: Any) -> None:
    """Checks the sizes in Megatron's parsed ``args``.

    Raises:
        PlanError: naming the first flag that is out of its bounds.
    """
    for flag, value in _sizes(args):
        within(flag, value)


def _sizes(args: Any) -> Iterator[tuple[str, int]]:
    for flag in BOUNDS:
        value = getattr(args, flag[2:].replace("-", "_"), None)
        if flag.startswith("--") and isinstance(value, int):
            yield flag, value
