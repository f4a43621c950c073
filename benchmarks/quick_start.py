"""Does in one process, before it forks the ranks, what every rank of a Megatron job repeats at its start."""

from __future__ import annotations

from argparse import ArgumentParser
from functools import cache, partial

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
