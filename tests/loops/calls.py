"""Each loop's call of the schedule function, argument for argument, on a small model of two pipeline ranks.

Only names of arguments and shapes of results are theirs.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection

from tests.integration.core_loop import LENGTH, ROWS, forward_step, model_of, samples
from tests.integration.in_groups import in_groups
from tests.integration.results import Call, Done
from tests.loops import ours
from tests.loops.loop_calls import CALLS, LoopCall
from tests.support.weights import named_parameters

_MICROBATCHES = 5


def called(schedule: str | None, chunks: int) -> list[list[Done]]:
    """Makes all calls in turn, on the same model, and returns what each rank has after each.

    Args:
        schedule: ours; None for none.
        chunks: model chunks of each rank.
    """
    sizes = {"pipeline_model_parallel_size": 2}
    if chunks > 1:
        sizes["virtual_pipeline_model_parallel_size"] = chunks
    return in_groups(2, _called, schedule, **sizes)


def imported_before(module: str, name: str) -> bool:
    """Whether a loop that imported ``name`` before install() has the replacement too, also after a second install()."""
    return in_groups(1, _imported_before, module, name)[0]


def _imported_before(module: str, name: str) -> bool:
    loop = sys.modules["a_loop"] = ModuleType("a_loop")
    stock = getattr(sys.modules[module], name)
    setattr(loop, name, stock)
    ours.install("zb-1p")
    ours.install("zb-1p")
    return stock is not getattr(loop, name) is getattr(sys.modules[module], name)


def _called(schedule: str | None) -> list[Done]:
    passes = ours.install(schedule)
    chunks = model_of()
    return [_once(chunks, call, passes) for call in CALLS.values()]


def _once(chunks: list[Any], call: LoopCall, passes: Counter[str]) -> Done:
    passes.clear()
    for chunk in chunks:
        chunk.zero_grad_buffer()
    iterators = [samples(Call(_MICROBATCHES), varied=False) for _ in chunks]
    several = call.listed or len(chunks) > 1
    groups = ProcessGroupCollection.use_mpu_process_groups()
    known = {
        "forward_step_func": partial(_forward_step, call.results),
        "data_iterator": iterators if several else iterators[0],
        "model": chunks if several or call.listed_model else chunks[0],
        "num_microbatches": _MICROBATCHES,
        "seq_length": LENGTH,
        "micro_batch_size": ROWS,
        "decoder_seq_length": LENGTH,
        "forward_only": call.forward_only,
        "adjust_tensor_shapes_fn": None,
        "p2p_communicator": P2PCommunicator(parallel_state.get_pipeline_model_parallel_group(), chunks[0].config),
        "pg_collection": groups,
    }
    results = get_forward_backward_func()(**{name: known[name] for name in call.arguments})
    named = ((name, parameter.main_grad.clone()) for name, parameter in named_parameters(chunks))
    return Done(results, dict(named), dict(passes))


def _forward_step(results: str, data_iterator: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    output, _ = forward_step(data_iterator, model)
    return output, _RESULTS[results]


def _sum_and_number(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    number = torch.tensor(losses.numel(), dtype=torch.int)
    return losses.sum(), number, {"loss": torch.stack([losses.detach().sum(), number.float()])}


_RESULTS: dict[str, Callable[[torch.Tensor], tuple[Any, ...]]] = {
    "tensors": _sum_and_number,
    "nested": lambda losses: (
        losses.mean(),
        {"loss": losses.mean().item(), "metrics": {"tokens": [losses.numel()]}, "model_output": {"x": losses.detach()}},
    ),
    "numbers": lambda losses: (losses.mean(), {"loss": losses.mean().item(), "num_valid_samples": len(losses)}),
    "values": lambda losses: (losses.new_zeros(()), {"values": losses.detach()}),
    "lists of tensors": lambda losses: (losses.new_zeros(()), {"log_probs": list(losses.detach())}),
    "keys and values": lambda losses: (
        losses.mean(),
        torch.tensor(1),
        {"keys": ["loss", "entropy"], "values": torch.stack([losses.detach().sum(), losses.detach().max()])},
    ),
}
