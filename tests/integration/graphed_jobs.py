"""Jobs whose layers are CUDA graphs, by the model of CUDA graphs on the CPU."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from megatron.training import training

import pretrain_gpt
from megatron.schedules.integration.graphs import replay
from megatron.schedules.runtime.weight_gradients import WeightGradients
from tests.integration import fused_kernels, low_rank
from tests.integration.core_loop import core_loop
from tests.integration.forked_ranks import run_ranks
from tests.integration.results import Call, Graphed
from tests.support import cuda_graphs
from tests.support.weights import named_parameters


def graphed(world: int, flags: Sequence[str], fault: str = "", adapters: bool = False) -> list[Graphed]:
    """Run ``pretrain_gpt.py`` with ``flags`` on ``world`` ranks, with one of :data:`FAULTS` in it.

    With ``adapters`` only low-rank ones beside every linear are trained.
    """
    return run_ranks(world, _rank, list(flags), fault, adapters)


def graphed_loop(sizes: dict[str, int], settings: dict[str, Any], calls: Sequence[Call], **options: Any) -> Any:
    """:func:`.core_loop` with the model of CUDA graphs on each rank."""
    return core_loop(sizes, settings, calls, prepare=_graphs_on_cpu, **options)


def _graphs_on_cpu() -> None:
    cuda_graphs.install()
    _share_by_copying()


def _rank(flags: list[str], fault: str, adapters: bool) -> Graphed:
    torch.set_num_threads(1)
    fused_kernels.forget()
    _graphs_on_cpu()
    if adapters:
        low_rank.put_in_place()
    if fault:
        FAULTS[fault]()
    seen = Graphed([], [], 0, [])
    log = training.training_log

    def training_log(losses: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        if "lm loss" in losses:
            seen.losses.append(float(losses["lm loss"]))
        return log(losses, *args, **kwargs)

    def recorded(schedule: Callable[..., Any]) -> Callable[..., Any]:
        def call(*, model: Any, forward_only: bool = False, **rest: Any) -> Any:
            before = cuda_graphs.COUNTS["replays"]
            result = schedule(model=model, forward_only=forward_only, **rest)
            if not forward_only:
                named: list[Any] = [(n, p) for n, p in named_parameters(model) if hasattr(p, "main_grad")]
                seen.gradients.append({name: _digest(parameter.main_grad) for name, parameter in named})
                seen.replays.append(cuda_graphs.COUNTS["replays"] - before)
            return result

        return call

    stock_pretrain = pretrain_gpt.pretrain

    def pretrain(*args: Any, **kwargs: Any) -> None:
        choose = training.get_forward_backward_func
        training.get_forward_backward_func = lambda *a, **k: recorded(choose(*a, **k))
        stock_pretrain(*args, **kwargs)

    training.training_log, pretrain_gpt.pretrain = training_log, pretrain
    sys.argv = ["pretrain_gpt.py", *flags]
    pretrain_gpt.main()
    return seen._replace(captures=cuda_graphs.COUNTS["captures"])


def _share_by_copying() -> None:
    """Megatron gives discarded outputs the memory of recomputed ones; that of the model's pool stays where it is."""
    compiled = random._get_share_storage  # which takes half a minute on a new machine

    def share(output: torch.Tensor, recomputed: torch.Tensor) -> None:
        if cuda_graphs.block_of(output) is None:
            compiled()(output, recomputed)
        else:
            output.data.copy_(recomputed)

    random._get_share_storage = lambda: share


def _digest(gradient: torch.Tensor) -> str:
    assert gradient.dtype is torch.float32
    return hashlib.sha256(gradient.numpy().tobytes()).hexdigest()


def _no_copy_in() -> None:
    WeightGradients.kept = lambda self, operand: operand  # type: ignore[method-assign]


def _no_copy_out() -> None:
    replay._Leaving.backward = staticmethod(lambda ctx, gradient: gradient)


def _outputs_in_place() -> None:
    replay.memory_of = lambda values: ()  # type: ignore[assignment]


def _stale() -> None:
    kept = WeightGradients.kept
    WeightGradients.kept = lambda self, operand: cuda_graphs.weak(kept(self, operand))  # type: ignore[method-assign]


FAULTS: Mapping[str, Callable[[], None]] = {
    "outputs in place": _outputs_in_place,
    "no copy in": _no_copy_in,
    "no copy out": _no_copy_out,
    "stale": _stale,
}
