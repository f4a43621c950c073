"""Splits the backward of Megatron's local tensor-parallel linears into I and W.

Hook: ``_forward_impl`` of each ``ColumnParallelLinear`` and ``RowParallelLinear`` instance. Stock computes input and
weight gradient in one autograd Function that adds to ``main_grad``, so outside code cannot separate them.

The following are never split; stock's Function computes the weight gradient in I:

- output layers: see :func:`output_layers`;
- frozen weights, which have no weight gradient;
- weights sharded over a rematerialisation group (``gtp_remat_size`` > 1) and Megatron-FSDP's: their gradient has its
  own communication, tied to stock's backward;
- a ``weight`` argument that is not a leaf: its gradient continues beyond W;
- subclasses with their own ``_forward_impl``.

:func:`gradients_in_their_passes` switches ``defer_embedding_wgrad_compute`` off.

The communication of expert linears (``explicit_expert_comm``) is outside ``_forward_impl``. Stock's local linears do
not support fp8. Based on megatron-core 0.19.2, ``tensor_parallel/layers.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel import layers as stock
from megatron.core.utils import get_tensor_model_parallel_group_if_none
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.schedules.integration.linears.fused_accumulation import add_to_main_grad, fused_gradient
from megatron.schedules.integration.linears.products import Product, Spread
from megatron.schedules.runtime.function_modes import without_modes
from megatron.schedules.runtime.parameter_leaves import StandIn
from megatron.schedules.runtime.weight_gradients import Key, WeightGradients

# Why a linear's weight gradient is computed in I.
FROZEN, FSDP, OWN_FORWARD = "frozen weight", "Megatron-FSDP's weight", "forward of its own"

# Attribute name in Megatron's language models.
_OUTPUT = "output_layer"
LINEARS = (stock.ColumnParallelLinear, stock.RowParallelLinear)
_Whole: Any = stock.LinearWithGradAccumulationAndAsyncCommunication
# What stock's Function is given, in order: versions differ. They are the parameters of a linear's forward too.
_PARAMETERS = tuple(inspect.signature(_Whole.forward).parameters)[1:]
_DEFAULTS = {
    parameter.name: parameter.default
    for parameter in inspect.signature(stock.linear_with_grad_accumulation_and_async_allreduce).parameters.values()
    if parameter.default is not parameter.empty
}
# Behind the input, the weight and the bias.
_SETTINGS = 3
_Settings = tuple[tuple[Any, ...], dict[str, Any]]
# Of the input in the split Function.
_INPUT = 2
_UNCHANGED = nullcontext()


def split_linears(model_chunk: torch.nn.Module, store: WeightGradients) -> int:
    """Makes the local linears in ``model_chunk`` defer their weight gradients to ``store`` in split backwards.

    A forward with ``store.current`` set and gradients enabled gets a split backward; every other forward is stock's. A
    second call binds the linears to the newer store. Parameters, state dicts and hooks do not change.

    Args:
        model_chunk: a model or chunk, wrapped (``Float16Module``, ``DistributedDataParallel``) or not.
        store: queue in which the weight gradients wait for their W.

    Returns:
        The number of linears now bound to ``store``.
    """
    bound, whole = 0, output_layers(model_chunk)
    gradients_in_their_passes(model_chunk)
    for module in model_chunk.modules():
        if not isinstance(module, LINEARS):
            continue
        if is_split(module):
            del module.__dict__["_forward_impl"]
        own = "_forward_impl" in module.__dict__ or not any(
            type(module)._forward_impl is linear._forward_impl for linear in LINEARS
        )
        if own:
            continue
        module._forward_impl = _ForwardImpl(module, store, splits=module not in whole)
        bound += 1
    return bound


def gradients_in_their_passes(model_chunk: torch.nn.Module) -> None:
    """Switches ``defer_embedding_wgrad_compute`` off in ``model_chunk``.

    It stores the logits' gradients of several microbatches until stock's own schedule ends.
    """
    for module in model_chunk.modules():
        if isinstance(module, LINEARS):
            module.config.defer_embedding_wgrad_compute = False


def is_split(linear: torch.nn.Module) -> bool:
    """Returns whether :func:`split_linears` has bound this linear to a store."""
    return isinstance(linear.__dict__.get("_forward_impl"), _ForwardImpl)


def defers(linear: torch.nn.Module) -> bool:
    """Returns whether a split forward of this linear defers its weight gradient to W."""
    if not is_split(linear) or linear.weight is None:
        return False
    weight: Any = linear.weight
    bias: Any = linear.bias
    splits: bool = linear.__dict__["_forward_impl"].splits
    return splits and _why_whole(weight, bias, {}) is None


def whole_because(linear: torch.nn.Module) -> str | None:
    """Returns why a local linear computed its weight gradient in I when it last ran; None if it deferred it to W."""
    return linear.__dict__["_forward_impl"].whole_because if is_split(linear) else OWN_FORWARD


def output_layers(model_chunk: torch.nn.Module) -> set[torch.nn.Module]:
    """Returns the output layers in ``model_chunk`` and all modules inside them. They are never split.

    W needs the gradient of the logits, by far the largest tensor of a model: 2.1 GB for 8192 tokens and a vocabulary of
    128 thousand. It would store one for each waiting microbatch. Stock's own backward of the layer hides its
    communication. I of the last stage is longer by that product and its W is shorter, as ``tools/profile_passes.py``
    measures.
    """
    return {module for name, module in model_chunk.named_modules() if _OUTPUT in name.split(".")}


class _ForwardImpl:
    """Replaces one linear's ``_forward_impl`` and chooses between stock's Function and the split one."""

    def __init__(self, module: Any, store: WeightGradients, *, splits: bool) -> None:
        self._stocks = module._forward_impl
        self._store = store
        self._row_parallel, self._gathered_over = isinstance(module, stock.RowParallelLinear), _scattered_over(module)
        self.splits = splits
        self.whole_because: str | None = None

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        # Without gradients there is nothing to split: evaluation, or the first run of a recomputed block.
        if torch.is_grad_enabled():
            key = self._store.current
            if self.splits and key is not None:
                with without_modes():
                    use = self._use(key, weight, bias, (args, kwargs))
                if use is not None:
                    split: Tensor = _SplitLinear.apply(use, key, input, *use.leaves)
                    return split
            fuses = kwargs.get("gradient_accumulation_fusion") and weight.requires_grad
            if fuses and self._store.hooked and hasattr(weight, "main_grad"):
                weight = _hookable(weight)
        whole: Tensor = self._stocks(input, weight, bias, *args, **kwargs)
        return whole

    def _use(self, key: Key, weight: Tensor, bias: Tensor | None, settings: _Settings) -> _Use | None:
        """Returns how the forward of ``key`` uses this linear; None if it must not be split."""
        leaves = self._store.leaves
        earlier: _Use | None = leaves.kept_by(self)
        if earlier is not None and earlier.is_of(weight, bias, settings):
            leaves.add_again(key, earlier.stand_ins)
            return earlier
        args, kwargs = settings
        given = _DEFAULTS | dict(zip(_PARAMETERS[_SETTINGS:], args, strict=False)) | kwargs
        self.whole_because = _why_whole(weight, bias, given)
        if self.whole_because is not None:
            return None
        trained = bias if bias is not None and bias.requires_grad else None
        stand_ins = tuple(leaves.add(key, each) for each in (weight, trained) if each is not None)
        leaf: Any = stand_ins[0].leaf
        main_grad = getattr(weight, "main_grad", None) if given["gradient_accumulation_fusion"] else None
        if main_grad is not None:
            leaf.main_grad = main_grad
        if given["tp_group"] is None:
            given["tp_group"] = get_tensor_model_parallel_group_if_none(None)
        given |= {"weight": leaf, "bias": bias if trained is None else stand_ins[1].leaf}
        in_order = tuple(given[name] for name in _PARAMETERS[1:])
        over = given["tp_group"] if given["sequence_parallel"] else None
        ahead = self._row_parallel and bool(given["gradient_accumulation_fusion"])
        spread = Spread(over, self._gathered_over, ahead) if over or self._gathered_over or ahead else None
        leaves_of, parameters = tuple(each.leaf for each in stand_ins), tuple(each.parameter for each in stand_ins)
        use = _Use(self._store, stand_ins, leaves_of, parameters, bias, main_grad, settings, in_order, spread)
        leaves.keep(self, use)
        return use


def _why_whole(weight: Tensor, bias: Tensor | None, given: Mapping[str, Any]) -> str | None:
    """Returns why a linear that is ``given`` these arguments is not split; None if it is."""
    if not weight.requires_grad:
        return FROZEN
    if not weight.is_leaf or (bias is not None and not bias.is_leaf):
        return "weight or bias computed from other parameters"
    if given.get("gtp_remat_size", 1) != 1:
        return "weight sharded over a rematerialisation group"
    if hasattr(weight, "__fsdp_param__"):
        return FSDP
    if given.get("output_dtype") not in (None, weight.dtype):
        return "output of another type than its weight"
    return None


def _hookable(weight: Any) -> Tensor:
    """Returns the tensor that an unsplit linear may save for ``weight`` under saved-tensor hooks.

    The hooks drop attributes. With this tensor stock's backward still finds ``main_grad``, and a dummy gradient still
    fires the weight's own hooks.
    """
    alias: Any = _Alias.apply(weight)
    alias.main_grad = weight.main_grad
    return alias


class _Alias(torch.autograd.Function):
    """Alias of a weight. It receives stock's dummy gradient if its user returns none."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor | None:
        return fused_gradient(ctx.weight, ctx.weight.dtype) if gradient is None else gradient


def _scattered_over(linear: Any) -> ProcessGroup | None:
    """Ranks over which stock reduces and scatters the rows of the linear's output; None if it does not."""
    scatters = isinstance(linear, stock.RowParallelLinear) and linear.sequence_parallel
    return linear.tp_group if scatters and not linear.explicit_expert_comm and linear.tp_group.size() > 1 else None


class _Use(NamedTuple):
    """How the forwards of one call of the schedule use a linear, for their I and W.

    Args:
        store: of the schedule.
        stand_ins: of the trained parameters: the weight, and perhaps the bias.
        leaves: theirs.
        parameters: themselves.
        bias: of the product, trained or not.
        main_grad: what products add to; None without gradient accumulation fusion.
        settings: further arguments of stock's linear.
        given: arguments of stock's Function behind the input.
        spread: of the operands of its W.
    """

    store: WeightGradients
    stand_ins: tuple[StandIn, ...]
    leaves: tuple[Tensor, ...]
    parameters: tuple[Tensor, ...]
    bias: Tensor | None
    main_grad: Tensor | None
    settings: _Settings
    given: tuple[Any, ...]
    spread: Spread | None

    def is_of(self, weight: Tensor, bias: Tensor | None, settings: _Settings) -> bool:
        """Returns whether another forward uses the same memory in the same way."""
        return (
            weight is self.stand_ins[0].parameter
            and bias is self.bias
            and settings == self.settings
            and len(self.stand_ins) == 1 + (bias is not None and bias.requires_grad)
            and all(each.parameter.requires_grad and each.in_place() for each in self.stand_ins)
            and (self.main_grad is None or weight.main_grad is self.main_grad)  # type: ignore[attr-defined]
        )


class _SplitLinear(stock.LinearWithGradAccumulationAndAsyncCommunication):
    """Stock's linear, which in the engine's I computes only the input gradient and defers W to the store.

    In every other backward it is stock's. Shapes: input (s, b, h_in), or (s / tp, b, h_in) under sequence parallelism;
    output (s, b, h_out). Two dimensions, (tokens, h), work too.
    """

    @staticmethod
    def forward(ctx: Any, use: _Use, key: Key, input: Tensor, *leaves: Tensor) -> Tensor:
        ctx.use, ctx.key = use, key
        output: Tensor = _Whole.forward(ctx, input, *use.given)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.use.store.defers(ctx.key):
            return None, None, *_whole_backward(ctx, grad_output)
        # Autocast takes as long as all else that I does here.
        autocast = torch.is_autocast_enabled("cuda") or getattr(ctx, "_fwd_used_autocast", True)
        grad_input = (_in_forwards_autocast if autocast else _input_gradient)(ctx, grad_output)
        return None, None, grad_input, *(None,) * len(ctx.use.leaves)


def _input_gradient(ctx: Any, grad_output: Tensor) -> Tensor | None:
    """I of one use of a linear: returns the input's gradient, if needed, and defers W."""
    use: _Use = ctx.use
    with without_modes():
        input, weight = ctx.saved_tensors
        grad_input = None
        if ctx.needs_input_grad[_INPUT]:
            # This rank's own gradient must stay allocated until it is reduced.
            own = grad_output.matmul(weight)
            grad_input, reducing = _reduced(own, input, ctx)
            if reducing is not None:
                use.store.compute_ahead(ctx.key)
                reducing.wait()
        # Detached, or the graph in front of the linear would stay until W.
        use.store.add(_WeightGradient(ctx, input.detach(), grad_output))
    return grad_input


_in_forwards_autocast = stock.custom_bwd(_input_gradient)


def _whole_backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    """Stock's backward of a leaf's product, in which the weight's hooks run as without a leaf."""
    grad_input, grad_weight, grad_bias, *_ = _Whole.backward(ctx, grad_output)
    if grad_weight is None and ctx.gradient_accumulation_fusion:
        grad_weight = fused_gradient(ctx.use.stand_ins[0].parameter, grad_output.dtype)
    return (grad_input, grad_weight, grad_bias)[: 1 + len(ctx.use.leaves)]


def _reduced(grad_input: Tensor, input: Tensor, ctx: Any) -> tuple[Tensor, Any]:
    """Sums the input gradient over the tensor-parallel ranks, and scatters it if the input was gathered.

    Returns the gradient with the communication to wait for, or None.
    """
    if ctx.sequence_parallel:
        assert not ctx.allreduce_dgrad
        scattered = torch.empty(input.shape, dtype=input.dtype, device=input.device)
        return scattered, stock.dist_reduce_scatter_func(scattered, grad_input, group=ctx.tp_group, async_op=True)
    if ctx.allreduce_dgrad:
        return grad_input, torch.distributed.all_reduce(grad_input, group=ctx.tp_group, async_op=True)
    return grad_input, None


class _WeightGradient(Product):
    """W of one use of a linear."""

    def __init__(self, ctx: Any, input: Tensor, grad_output: Tensor) -> None:
        use: _Use = ctx.use
        self._dtype = input.dtype if ctx.gradient_accumulation_fusion else None
        # This runs inside backward, in the forward's autocast state.
        self._autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        super().__init__(use.store, ctx.key, use.parameters, (input, grad_output), use.spread)

    def multiply(self, input: Tensor, grad_output: Tensor) -> list[Tensor | None]:
        """Returns the gradients; None for a weight whose gradient is already in ``main_grad``."""
        weight, *trained_bias = self.parameters
        with without_modes(), self._as_in_forward():
            # As stock does, for the same bits: contiguous, and in two dimensions.
            input, grad_output = input.contiguous().flatten(0, -2), grad_output.contiguous().flatten(0, -2)
            if self._dtype is not None:
                add_to_main_grad(weight, input, grad_output)
            gradients = [None if self._dtype is not None else grad_output.t().matmul(input)]
            if trained_bias:
                gradients.append(grad_output.sum(dim=0))
        return gradients

    def _as_in_forward(self) -> AbstractContextManager[Any]:
        """Restores the forward's autocast state. W begins without one; I has the state of its own backward."""
        if self._autocast is None and not self.ahead:
            return _UNCHANGED
        return torch.autocast("cuda", dtype=self._autocast, enabled=self._autocast is not None)

    def completed(self, product: list[Tensor | None]) -> list[Tensor | None]:
        """Returns the gradients, with what stands for one that is already in ``main_grad``."""
        if self._dtype is not None:
            product[0] = fused_gradient(self.parameters[0], self._dtype)
        return product
