"""Numbers of ours in what stock writes beside its line: TensorBoard, Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer


def write_scalars(scalars: Mapping[str, float], args: Any) -> None:
    """Write ``scalars`` for the iteration being logged, on the rank that has writers.

    Args:
        scalars: values by name.
        args: the job's.
    """
    iteration = args.curr_iteration + 1
    board, wandb = get_tensorboard_writer(), get_wandb_writer()
    if board:
        for name, value in scalars.items():
            board.add_scalar(name, value, iteration)
    if wandb:
        wandb.log(dict(scalars), iteration)
