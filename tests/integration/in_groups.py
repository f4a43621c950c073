"""A function on forked ranks that have Megatron's process groups and the CPU stand-in: tests of single modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as stock_random

from tests.integration.forked_ranks import run_ranks


def in_groups(world: int, body: Callable[..., Any], *args: Any, **state: Any) -> list[Any]:
    """What ``body(*args)`` returns on each of ``world`` ranks, in rank order.

    Args:
        world: number of ranks.
        body: a module-level function.
        args: its arguments.
        state: for ``parallel_state.initialize_model_parallel``.
    """
    return run_ranks(world, _with_groups, body, args, state)


def _with_groups(body: Callable[..., Any], args: tuple[Any, ...], state: dict[str, Any]) -> Any:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    # So that models can be copied: both copies talk in the same groups.
    torch.distributed.ProcessGroup.__deepcopy__ = lambda group, _: group
    parallel_state.initialize_model_parallel(**state)
    stock_random.get_cuda_rng_tracker().states_["model-parallel-rng"] = torch.random.get_rng_state()
    result = body(*args)
    torch.distributed.barrier()  # nobody takes its connections away while another still talks
    return result
