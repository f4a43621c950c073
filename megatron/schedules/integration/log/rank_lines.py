"""Prints lines on one rank of the job."""

from __future__ import annotations

import sys

import torch.distributed as dist


def print_rank_0(line: str) -> None:
    """Prints a line on the first rank."""
    if dist.get_rank() == 0:
        _print(line)


def print_rank_last(line: str) -> None:
    """Prints a line on the last rank, where stock prints the losses."""
    if dist.get_rank() == dist.get_world_size() - 1:
        _print(line)


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
