"""A job of the real main program of which all that Megatron logs is kept, from weights drawn by name."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.training import global_vars, training

import pretrain_gpt
from tests.integration.forked_ranks import run_ranks
from tests.integration.results import Logged
from tests.support.weights import named_parameters, start_equal
from tests.waiting import HANGS_S

_LEFT_OUT = ("time", "mem-", "throughput", "vs samples", "pipeline/")
"""In the names of what differs from run to run, is logged twice, or is the schedule's alone."""


_Tensors = dict[tuple[str, int, int], torch.Tensor]


def logged(world: int, flags: Sequence[str], timeout: float = HANGS_S) -> Logged:
    """Trains with ``flags`` on ``world`` ranks."""
    ranks = run_ranks(world, _rank, list(flags), timeout=timeout)
    last = ranks[-1]
    together: list[dict[Any, torch.Tensor]] = [
        {key: tensor for rank in ranks for key, tensor in rank[at].items()} for at in (1, 2)
    ]
    return Logged(last[0], *together, [rank[3] for rank in ranks])


class _Writer:
    """Takes what goes to tensorboard."""

    def __init__(self, scalars: dict[tuple[str, int], float]) -> None:
        self._scalars = scalars

    def add_scalar(self, name: str, value: Any, step: int, *args: Any, **named: Any) -> None:
        if not any(word in name for word in _LEFT_OUT):
            self._scalars[name, step] = float(value)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **named: None


def _rank(flags: list[str]) -> tuple[dict[tuple[str, int], float], _Tensors, _Tensors, int]:
    scalars: dict[tuple[str, int], float] = {}
    gradients: dict[Any, torch.Tensor] = {}
    models: list[Any] = []
    build = training.get_megatron_optimizer

    def get_megatron_optimizer(config: Any, model: Any, *rest: Any, **named: Any) -> Any:
        start_equal(model)
        _draw_vectors(model)
        models.extend(model)
        optimizer = build(config, model, *rest, **named)
        step = optimizer.step

        def stepped() -> Any:
            if not gradients and not config.use_distributed_optimizer:
                gradients.update(by_name(model, lambda parameter: getattr(parameter, "main_grad", None)))
            return step()

        optimizer.step = stepped
        return optimizer

    def set_tensorboard_writer(args: Any) -> None:
        if args.rank == args.world_size - 1:
            global_vars._GLOBAL_TENSORBOARD_WRITER = _Writer(scalars)

    training.get_megatron_optimizer = get_megatron_optimizer
    global_vars._set_tensorboard_writer = set_tensorboard_writer
    torch.set_num_threads(1)
    if "--save" in flags:  # the writer's process would import all anew
        filesystem_async.get_write_results_queue(mp_mode="fork")
    sys.argv = ["pretrain_gpt.py", *flags]
    try:
        pretrain_gpt.main()
    except SystemExit as leaving:
        if leaving.code:
            raise AssertionError(f"ended with status {leaving.code}") from leaving
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return scalars, gradients, by_name(models, numbers), compiled


def _draw_vectors(model: Sequence[Any]) -> None:
    """Draws norms and biases too: some flags leave them as they were allocated."""
    for name, parameter in named_parameters(model):
        if parameter.ndim < 2:
            part = (
                parallel_state.get_tensor_model_parallel_rank()
                if getattr(parameter, "tensor_model_parallel", False)
                else 0
            )
            generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {part}".encode()))
            middle = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            with torch.no_grad():
                parameter.copy_(middle + 0.02 * torch.randn(parameter.shape, generator=generator))


def by_name(model: Sequence[Any], value: Callable[[Any], torch.Tensor | None]) -> _Tensors:
    """What ``value`` gives for each parameter, by its name in the whole model and the ranks that hold it."""
    data, tensor = parallel_state.get_data_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    values = ((name, value(parameter)) for name, parameter in named_parameters(model))
    # Frozen ones have no gradient.
    return {(name, data, tensor): value.detach().clone() for name, value in values if value is not None}


def numbers(parameter: Any) -> torch.Tensor:
    """A weight's numbers, also those of one that is stored in FP8 or FP4."""
    dequantize = getattr(parameter, "dequantize", None) if type(parameter) is not torch.nn.Parameter else None
    return dequantize() if dequantize else parameter.data
