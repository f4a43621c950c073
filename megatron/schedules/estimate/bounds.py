"""Bounds of Megatron's sizes, for training, dry runs and files of a model's flags."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.schedules.schedule.placement import MOST_RANKS
from megatron.schedules.utils.errors import PlanError

_PROCESSES = 10_000_000
_WIDTH = 10_000_000
_TOKENS = 1_000_000_000
# Searches assign layers one by one.
MOST_LAYERS = 2000

# (least, most). The most is far above any model's, yet planning stays fast. 0 is allowed where it means "none".
_FLAGS = (
    (
        1,
        _PROCESSES,
        "context-parallel-size expert-model-parallel-size expert-tensor-parallel-size "
        "num-distributed-optimizer-instances tensor-model-parallel-size",
    ),
    (
        0,
        MOST_LAYERS,
        "decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers num-layers-at-end-in-bf16 "
        "num-layers-at-start-in-bf16",
    ),
    (
        1,
        _WIDTH,
        "dsa-indexer-head-dim dsa-indexer-n-heads dsa-indexer-topk ffn-hidden-size hidden-size kv-channels "
        "kv-lora-rank linear-conv-kernel-dim linear-key-head-dim linear-num-key-heads linear-num-value-heads "
        "linear-value-head-dim make-vocab-size-divisible-by mamba-head-dim mamba-num-groups mamba-num-heads "
        "mamba-state-dim micro-batch-size moe-ffn-hidden-size moe-latent-size q-lora-rank qk-head-dim "
        "qk-pos-emb-head-dim v-head-dim",
    ),
    (0, _TOKENS, "global-batch-size"),
    (1, _TOKENS, "max-position-embeddings padded-vocab-size seq-length vocab-size"),
    (1, 100_000, "moe-router-topk"),
    (0, _WIDTH, "moe-shared-expert-intermediate-size"),
    (0, 100, "mtp-num-layers"),
    (1, 1_000_000, "num-attention-heads num-query-groups"),
    (0, 100_000, "num-experts"),
    (
        1,
        MOST_LAYERS,
        "num-layers num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank recompute-num-layers",
    ),
    (1, MOST_RANKS, "pipeline-model-parallel-size"),
    (0, 1_000_000_000_000, "train-iters"),
)
BOUNDS = {
    **{f"--{name}": (least, most) for least, most, names in _FLAGS for name in names.split()},
    # Environment variables.
    "$LOCAL_RANK": (0, _PROCESSES - 1),
    "$LOCAL_WORLD_SIZE": (1, _PROCESSES),
    "$RANK": (0, _PROCESSES - 1),
    "$SLURM_NTASKS": (1, _PROCESSES),
    "$WORLD_SIZE": (1, _PROCESSES),
}


def within(name: str, value: int) -> int:
    """Checks and returns ``value``.

    Raises:
        PlanError: if it is out of the bounds of ``name``.
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
