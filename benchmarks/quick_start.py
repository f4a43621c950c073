"""Does in one process, before it forks the ranks, what every rank of a Megatron job repeats at its start.

Ranks that share a GPU may have to talk over gloo, which waits for the device in each collective and has few of them for
a GPU's tensors. So groups of one rank, as those of data and tensor parallelism are, use NCCL.
"""

from __future__ import annotations

from argparse import ArgumentParser
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
from megatron.training.argument_utils import ArgumentGroupFactory
from megatron.training.arguments import add_megatron_arguments


def quick_start() -> None:
    """Uses fewer mock documents and reads stock's configuration sources once, for this process and its forks."""
    # Stock draws a hundred thousand documents, and sorts them in every job, on every rank, for every chunk.
    MockGPTLowLevelDataset.size = 2000
    read = cache(partial(ArgumentGroupFactory._get_field_docstrings, ArgumentGroupFactory))
    ArgumentGroupFactory._get_field_docstrings = staticmethod(read)
    add_megatron_arguments(ArgumentParser())
    if torch.cuda.is_available():
        dist.new_group = partial(_group, dist.new_group)


def _group(new_group: Any, ranks: Any = None, timeout: Any = None, backend: str | None = None, **more: Any) -> Any:
    alone = ranks is not None and len(ranks) == 1
    return new_group(ranks, timeout, "nccl" if alone and backend is None else backend, **more)
