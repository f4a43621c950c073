"""Adds the pipeline's figures to stock's log line of an iteration, by replacing the functions that make the line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

from megatron.schedules.integration.session import Session, Stock


def training_log(stock: Stock, session: Session, *args: Any, **kwargs: Any) -> Any:
    """Calls stock's function and marks that the line of an iteration is being made."""
    if session.job is None:
        return stock(*args, **kwargs)
    with session.job.log.logging():
        return stock(*args, **kwargs)


def print_rank_last(stock: Stock, session: Session, message: str) -> None:
    """Calls stock's function and adds the pipeline's figures to an iteration's line.

    Writers and replanning get them too.
    """
    job = session.job
    found = None if job is None else job.log.logged(job.function.peak_activation_bytes)
    if job is not None and found is not None:
        message = "\n".join([message + found.words(), *found.warnings()])
        _write_scalars(found.scalars(), session.iteration())
        if job.replan is not None:
            job.replan.logged(found)
    stock(message)


def _write_scalars(scalars: Mapping[str, float], iteration: int) -> None:
    """Writes ``scalars`` (values by name) of ``iteration`` on the rank that has writers."""
    board, wandb = get_tensorboard_writer(), get_wandb_writer()
    if board:
        for name, value in scalars.items():
            board.add_scalar(name, value, iteration)
    if wandb:
        wandb.log(dict(scalars), iteration)
