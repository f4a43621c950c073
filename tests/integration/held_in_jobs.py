"""What each rank of a job really holds, tensor by tensor, beside what a dry run says of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.training import arguments, training

from megatron.schedules.estimate.device_memory import RankMemory
from megatron.schedules.integration import hooks
from megatron.schedules.integration.flags.arguments import completed
from megatron.schedules.integration.flags.configuration import adapters_of
from megatron.schedules.integration.linears.products import memory_of
from megatron.schedules.integration.schedule_function import ScheduleFunction
from megatron.schedules.job.job_costs import costs_of
from tests.integration.dry_runs import job_of


def estimate_here(*, one_kernel: bool, model: Sequence[torch.nn.Module]) -> tuple[RankMemory, ...]:
    """The estimate for the command line of this process as a CPU runs it, with attention in one kernel if asked.

    Where only adapters of its ``model`` are trained, it is that of a loop that trains them.
    """
    hooks.install()
    args = arguments.parse_args()
    asked = job_of(args)
    spec = completed(asked.spec, args)
    assert spec.model is not None
    build = replace(spec.model.build, plain=args.transformer_impl == "local", adapters=adapters_of(model))
    if one_kernel:
        build = replace(build, shape=replace(build.shape, fused=True), contiguous=True)
    spec = replace(spec, model=replace(spec.model, build=build))
    costs = costs_of(spec)
    plan = replace(asked.plan, request=replace(asked.request, costs=costs))
    return replace(asked, spec=spec, plan=plan).memory


def listen() -> dict[str, Any]:
    """Has a job note what this rank holds; filled when it has trained."""
    seen: dict[str, Any] = {}
    set_up, call = training.setup_model_and_optimizer, ScheduleFunction.__call__

    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        found = set_up(*args, **kwargs)
        seen["model"], seen["optimizer"] = found[:2]
        return found

    def noted(self: ScheduleFunction, *, forward_only: bool = False, **rest: Any) -> Any:
        if not forward_only:
            self.peaks.count_next_call()
        losses = call(self, forward_only=forward_only, **rest)
        if not forward_only:
            seen["activations"] = self.peaks.bytes
        return losses

    training.setup_model_and_optimizer = setup_model_and_optimizer
    ScheduleFunction.__call__ = noted  # type: ignore[method-assign]
    return seen


def held(seen: dict[str, Any]) -> tuple[int, dict[str, int]]:
    """This rank's place in its pipeline, and its bytes of weights, gradients, optimizer and activations."""
    weights = [parameter for chunk in seen["model"] for parameter in chunk.parameters()]
    buffers = [each for chunk in seen["model"] for each in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    found = {
        "parameters": sum(parameter.numel() for parameter in weights),
        "weights": sum(map(_bytes, weights)) + _copies(seen["model"]),
        "gradients": sum(each.grad_data.nbytes for each in buffers),
        "optimizer": _state(seen["optimizer"], _storages(weights)),
        "activations": seen["activations"],
    }
    return parallel_state.get_pipeline_model_parallel_rank(), found


_STORED = ("_data", "_transpose", "_scale_inv", "_rowwise_data", "_rowwise_scale_inv", "_columnwise_data")
_STORED += ("_columnwise_scale_inv", "_amax_rowwise", "_amax_columnwise")


def _bytes(parameter: torch.Tensor) -> int:
    """Bytes of a parameter; of one that is stored in FP8 or FP4, of its numbers and scales."""
    if type(parameter) is torch.nn.Parameter:
        return parameter.nbytes
    parts = (getattr(parameter, name, None) for name in _STORED)
    return sum(part.nbytes for part in parts if part is not None)


def _copies(model: Iterable[torch.nn.Module]) -> int:
    """Bytes of the quantized copies of weights that Transformer Engine caches."""
    caches = (getattr(module, "_fp8_workspaces", {}) for chunk in model for module in chunk.modules())
    return sum(part.nbytes for cache in caches for copy in cache.values() for part in memory_of(copy))


def _state(optimizer: Any, weights: set[int]) -> int:
    """Copies of parameters and moments, all that is no part of the model."""
    found = 0
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = each.optimizer
        copies = [parameter for group in inner.param_groups for parameter in group["params"]]
        found += sum(copy.nbytes for copy in copies if not _storages([copy]) & weights)
        moments = [value for state in inner.state.values() for name, value in state.items() if name != "step"]
        found += sum(value.nbytes for value in moments if isinstance(value, torch.Tensor))
    return found


def _storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}
