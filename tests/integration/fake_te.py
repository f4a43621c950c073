"""Stands for Transformer Engine on a CPU: the interface of its linears, on torch's own products.

What passes between a module, its backward and its ``wgrad_store`` follows Transformer Engine 2.20.2,
``pytorch/module/`` ``_common.py`` (``WeightGradStore``), ``linear.py``, ``layernorm_linear.py`` and
``grouped_linear.py``, and Megatron's subclasses of them in megatron-core 0.19.2. Kept from there because a split
depends on it:

- a forward reads store, parameters and ``is_first_microbatch``, and its backward goes by what the forward read;
- ``main_grad`` is looked up in the backward, on the tensor that stood for the weight in the forward;
- a weight gradient that is put off comes back as none, as a dummy under fused accumulation, and from
  ``GroupedLinear`` as the memory that is still to be filled (here: with NaN in it);
- the first microbatch of an iteration overwrites ``main_grad``;
- a column-parallel input is gathered along the sequence for its weight gradient, in I, where a flag on the autograd
  node (``LayerNormLinear``'s; ``Linear``'s before 2.16) or on its ``backward_objects`` says so;
- a column-parallel input gradient is on its way to the other ranks while the weight gradient is put off;
- biases that are handed on, or added after a row-parallel reduction, stay outside the product.

The norm is a step of its own here: its gradients come with I there too.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

VERSION = "2.20.2"


class WeightGradStore:
    """What a module has of its own; a split must leave it alone."""

    def delay_wgrad_compute(self) -> bool:
        return False

    def put(self, tensor_list: Sequence[Any], func: Callable[..., Any]) -> None:
        raise AssertionError("the module's own queue is not for us")


def gathered(x: Tensor, group: Any) -> Tensor:
    out = torch.empty((x.size(0) * group.size(), *x.shape[1:]), dtype=x.dtype)
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def scattered(x: Tensor, group: Any) -> Tensor:
    out = torch.empty((x.size(0) // group.size(), *x.shape[1:]), dtype=x.dtype)
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


def summed(x: Tensor, group: Any) -> Tensor:
    dist.all_reduce(x, group=group)
    return x


def reduction(x: Tensor, call: Any) -> tuple[Tensor, Any]:
    """What a column-parallel input gradient will be once the work, which is on its way, is done."""
    if not call.sequence:
        return x, dist.all_reduce(x, group=call.group, async_op=True)
    out = torch.empty((x.size(0) // call.group.size(), *x.shape[1:]), dtype=x.dtype)
    return out, dist.reduce_scatter_tensor(out, x.contiguous(), group=call.group, async_op=True)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.size(-1))


def _written(gradient: Tensor, into: Tensor | None, accumulate: bool) -> Tensor:
    """As a product writes its result: to memory of its own, over ``into``, or added to it."""
    if into is None:
        return gradient
    return into.add_(gradient) if accumulate else into.copy_(gradient)


def _reported(weight: Any, gradient: Tensor | None, fused: bool) -> Tensor | None:
    """What a backward gives autograd for a weight."""
    if not fused:
        return gradient
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.full(weight.shape, 0.0 if getattr(weight, "zero_out_wgrad", False) else torch.nan, dtype=weight.dtype)


def _remember(ctx: Any, weights: Sequence[Any], call: Any) -> None:
    ctx.call, ctx.is_first_microbatch = call, call.first
    ctx.fused = call.fused and weights[0].requires_grad
    if ctx.fused:
        ctx.origins = [weakref.ref(weight) for weight in weights]
        ctx.main_grads = [lambda weight=weight: weight.main_grad for weight in weights]


def _recall(ctx: Any, count: int) -> tuple[list[Any], list[Any]]:
    if not ctx.fused:
        return [None] * count, [None] * count
    origins = [origin() for origin in ctx.origins]
    assert all(origin is not None for origin in origins), "weight was removed"
    return origins, [main_grad() for main_grad in ctx.main_grads]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, bias: Tensor | None, call: Any) -> Tensor:
        ctx.save_for_backward(weight, x, bias)
        _remember(ctx, [weight], call)
        gathers = call.sequence and call.column
        holder = ctx
        if call.flag == "backward_input_needs_gather" and not call.older:
            holder = ctx.backward_objects = SimpleNamespace()
        vars(holder).update({call.flag: gathers, "fp8": False, "debug": call.debug, "ub_bulk_dgrad": False})
        total = gathered(x, call.group) if gathers else x
        out = total @ weight.t()
        if bias is not None:
            out = out + bias
        if call.row:
            return scattered(out, call.group) if call.sequence else summed(out, call.group)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        weight, x, bias = ctx.saved_tensors
        call, wants = ctx.call, ctx.needs_input_grad
        (origin,), (main_grad,) = _recall(ctx, 1)
        if call.row and call.sequence:
            dy = gathered(dy, call.group)
        holder = getattr(ctx, "backward_objects", ctx)
        total = gathered(x, call.group) if wants[0] and getattr(holder, call.flag) else x
        dx = work = None
        if wants[1]:
            dx = dy @ weight
            if call.column:
                dx, work = reduction(dx, call)
        if not wants[0]:
            if work is not None:
                work.wait()
            return None, dx, dy.sum(dim=(0, 1)) if wants[2] else None, None
        accumulate = call.fused and not ctx.is_first_microbatch
        early = bias is not None and call.early_bias

        def product(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor | None]:
            fuses_bias = bias is not None and not early
            dw = _written(_flat(dy).t() @ _flat(x), main_grad if call.fused else None, accumulate)
            return dw, _flat(dy).sum(dim=0) if fuses_bias else None

        dw, db = None, _flat(dy).sum(dim=0) if early else None
        if call.store is not None and call.store.delay_wgrad_compute():
            call.store.put([total, dy], product)
        else:
            dw, late = product(total, dy)
            db = late if db is None else db
        if work is not None:
            work.wait()
        return _reported(origin, dw, call.fused), dx, db, None


class _GroupedLinear(torch.autograd.Function):
    filled_later: list[Any] = []  # noqa: RUF012 - weak references to memory handed to a store, for tests

    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: list[int], call: Any, *parameters: Tensor) -> Tensor:
        weights, biases = parameters[: len(splits)], parameters[len(splits) :]
        ctx.save_for_backward(x, *weights)
        ctx.splits = splits
        _remember(ctx, weights, call)
        pairs = zip(x.split(splits), weights, biases, strict=True)
        return torch.cat([part @ w.t() + b if call.bias else part @ w.t() for part, w, b in pairs])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        call, count = ctx.call, len(weights)
        origins, main_grads = _recall(ctx, count)
        dys, xs = list(dy.split(ctx.splits)), list(x.split(ctx.splits))
        dx = torch.cat([part @ weight for part, weight in zip(dys, weights, strict=True)])
        if not ctx.needs_input_grad[3]:
            return dx, None, None, *[None] * (2 * count)
        early = call.bias and call.early_bias
        accumulate = call.fused and not ctx.is_first_microbatch
        outs = main_grads if call.fused else [torch.full_like(weight, torch.nan) for weight in weights]

        def product(xs: list[Tensor], dys: list[Tensor], outs: list[Tensor]) -> tuple[None, list[Any], None]:
            for x, dy, out in zip(xs, dys, outs, strict=True):
                _written(dy.t() @ x, out, accumulate)
            late = call.bias and not early
            return None, [dy.sum(dim=0) if late else None for dy in dys], None

        dbs: list[Any] = [dy.sum(dim=0) for dy in dys] if early else [None] * count
        if call.store.delay_wgrad_compute():
            call.store.put([xs, dys, outs], product)
            _GroupedLinear.filled_later += [weakref.ref(out) for out in outs]
        else:
            late = product(xs, dys, outs)[1]
            dbs = dbs if early else late
        dws = [_reported(origin, out, call.fused) for origin, out in zip(origins, outs, strict=True)]
        return dx, None, None, *dws, *dbs


class _Base(torch.nn.Module):
    gemm_bias_unfused_add = False
    early_bias = False
    flag = "backward_input_needs_gather"
    older = False  # than 2.16
    debug = False

    def _start(self, bias: bool, return_bias: bool, settings: dict[str, Any]) -> None:
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        self.parallel_mode = settings.get("parallel_mode")
        self.tp_group = settings.get("tp_group")
        self.tp_size = 1 if self.tp_group is None else self.tp_group.size()
        self.sequence_parallel = settings.get("sequence_parallel", False) and self.tp_size > 1
        self.fuse_wgrad_accumulation = settings.get("fuse_wgrad_accumulation", False)
        self.dtype = settings.get("params_dtype", torch.float32)
        self.wgrad_store = WeightGradStore()

    def _own(self, name: str, *shape: int) -> None:
        setattr(self, name, torch.nn.Parameter(torch.randn(shape).mul_(0.5).to(self.dtype)))

    def _call(self, first: bool | None) -> SimpleNamespace:
        parallel = self.tp_size > 1
        return SimpleNamespace(
            store=self.wgrad_store,
            fused=self.fuse_wgrad_accumulation,
            first=first,
            group=self.tp_group,
            sequence=self.sequence_parallel,
            column=parallel and self.parallel_mode == "column",
            row=parallel and self.parallel_mode == "row",
            early_bias=self.early_bias,
            flag=self.flag,
            older=self.older,
            debug=self.debug,
            bias=self.apply_bias,
        )


class Linear(_Base):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        return_bias: bool = False,
        delay_wgrad_compute: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__()
        self._start(bias, return_bias, settings)
        if self.parallel_mode == "column":
            out_features //= self.tp_size
        elif self.parallel_mode == "row":
            in_features //= self.tp_size
            self.gemm_bias_unfused_add = self.apply_bias
        self._own("weight", out_features, in_features)
        if bias:
            self._own("bias", out_features)
        else:
            self.bias = torch.Tensor()

    def _normed(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        x, call = self._normed(x), self._call(is_first_microbatch)
        fused_bias = self.apply_bias and not self.gemm_bias_unfused_add
        out = _Linear.apply(self.weight, x, self.bias if fused_bias else None, call)
        if self.gemm_bias_unfused_add:
            out = out + self.bias
        return (out, self.bias) if self.return_bias else out


class LayerNormLinear(Linear):
    flag = "ln_out_needs_gather"

    def __init__(self, in_features: int, out_features: int, delay_wgrad_compute: bool = False, **settings: Any) -> None:
        super().__init__(in_features, out_features, **settings)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features, dtype=self.dtype))
        self.layer_norm_bias = torch.nn.Parameter(torch.zeros(in_features, dtype=self.dtype))

    def _normed(self, x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], self.layer_norm_weight, self.layer_norm_bias)


class GroupedLinear(_Base):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        return_bias: bool = False,
        delay_wgrad_compute: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__()
        self._start(bias, return_bias, settings)
        self.num_gemms = num_gemms
        for i in range(num_gemms):
            self._own(f"weight{i}", out_features, in_features)
            if bias:
                self._own(f"bias{i}", out_features)
            else:
                setattr(self, f"bias{i}", torch.Tensor())

    def forward(self, x: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Any:
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms)]
        out = _GroupedLinear.apply(x, m_splits, self._call(is_first_microbatch), *weights, *biases)
        return (out, biases) if self.return_bias else out


def megatrons(linear: type[Any]) -> type[Any]:
    """Megatron's subclass of one of these classes: it keeps ``is_first_microbatch``, and a configuration."""

    class Megatrons(linear):
        def __init__(self, *args: Any, fp8: str | None = None, **settings: Any) -> None:
            super().__init__(*args, **settings)
            self.config = SimpleNamespace(fp8=fp8)
            self.is_first_microbatch = True

        def forward(self, *args: Any) -> Any:
            out = super().forward(*args, is_first_microbatch=self.is_first_microbatch)
            self.is_first_microbatch = False
            return out

    return Megatrons


def modules() -> dict[str, ModuleType]:
    """For ``sys.modules``: the packages to be found under Transformer Engine's names."""
    package, engine = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    package.__version__ = VERSION  # type: ignore[attr-defined]
    for linear in (Linear, LayerNormLinear, GroupedLinear):
        setattr(engine, linear.__name__, linear)
    package.pytorch = engine  # type: ignore[attr-defined]
    return {package.__name__: package, engine.__name__: engine}


def install() -> None:
    """Let this process find Transformer Engine, from now on."""
    sys.modules.update(modules())
