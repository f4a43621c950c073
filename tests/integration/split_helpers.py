"""Ranks as short processes with Megatron on gloo, small linears in them, and stock against split."""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron.schedules.runtime.recompute import Recomputes, recompute_layer
from megatron.schedules.runtime.weight_gradients import WeightGradients
from tests import ranks

PRELOAD = ("megatron.core", "megatron.core.distributed", "megatron.schedules.integration.linears.local")

SEQUENCE, BATCH = 4, 3
TOGETHER = "F0 I0 W0 F1 I1 W1 F2 I2 W2"
SEVERAL_I_AHEAD = "F0 F1 I0 F2 I1 I2 W0 W1 W2"


def failures_of(
    checks: Sequence[Callable[[], None]], before_each: Callable[[], object] = lambda: None
) -> dict[str, str]:
    """Tracebacks of those ``checks`` that fail, by name."""
    failures = {}
    for check in checks:
        before_each()
        try:
            check()
        except Exception:
            failures[check.__name__] = traceback.format_exc()
    return failures


def run_ranks(world_size: int, body: Callable[..., Any], *args: Any, **state: Any) -> list[Any]:
    """What ``body(*args)`` returns on each of ``world_size`` ranks that have Megatron's groups, in rank order.

    Args:
        body: a module-level function. Its result must be picklable without tensors that share memory.
        state: passed to ``parallel_state.initialize_model_parallel``.
    """
    return ranks.run_ranks(world_size, _with_groups, state, body, args, preload=PRELOAD)


def _with_groups(state: dict[str, Any], body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    from megatron.core import parallel_state

    without_cuda()
    # So that models can be copied: both copies talk in the same groups.
    torch.distributed.ProcessGroup.__deepcopy__ = lambda group, _: group
    parallel_state.initialize_model_parallel(**state)
    return body(*args)


def without_cuda() -> None:
    """Let stock allocate its buffers and read its generator states on the CPU, in this process."""
    from megatron.core.tensor_parallel import random as stock_random

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.current_stream = lambda *_: None  # type: ignore[assignment,return-value]
    stock_random._get_cuda_rng_state = lambda *_, **__: torch.zeros(1)
    stock_random._set_cuda_rng_state = lambda *_, **__: None
    stock_random.get_cuda_rng_tracker().states_["model-parallel-rng"] = torch.zeros(1)


def config(**changes: Any) -> Any:
    """A transformer config for linears on the CPU; tensor-parallel size as initialised."""
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig

    settings: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
    }
    dtype = changes.pop("dtype", torch.float32)
    return TransformerConfig(**settings | {"params_dtype": dtype, "bf16": dtype is torch.bfloat16} | changes)


class Block(torch.nn.Module):
    """Column then row parallel, something nonlinear between, then a head: (s, b, 8) -> (s, b, 16 / tp)."""

    def __init__(self, settings: Any, bias: bool = True, head_weight: torch.nn.Parameter | None = None) -> None:
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

        super().__init__()
        build = partial(torch.nn.init.normal_, std=0.5)
        common: dict[str, Any] = {"config": settings, "init_method": build, "bias": bias}
        self.norm = torch.nn.LayerNorm(8, dtype=settings.params_dtype)
        self.up = ColumnParallelLinear(8, 32, skip_bias_add=False, **common)
        self.down = RowParallelLinear(32, 8, input_is_parallel=True, skip_bias_add=False, **common)
        self.head = ColumnParallelLinear(
            8, 16, skip_bias_add=False, skip_weight_param_allocation=head_weight is not None, **common
        )
        # Not registered: the head weight belongs to someone else, as a tied output weight does.
        self.head_weight = [head_weight]
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)

    def hidden(self, x: Tensor) -> Tensor:
        """The part before the head: (s, b, 8) -> (s, b, 8)."""
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))[0]))[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x), weight=self.head_weight[0])[0]


class MainGrads:
    """What Megatron's data parallelism does when a parameter's accumulator fires, and how often it fired."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype, zero_out: bool = False) -> None:
        self.fired: dict[str, int] = {}
        self._keep = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            parameter.main_grad = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
            parameter.grad_added_to_main_grad = False
            parameter.zero_out_wgrad = zero_out
            self.fired[name] = 0
            accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            accumulator.register_hook(partial(self._hook, name, parameter))
            self._keep.append(accumulator)

    def _hook(self, name: str, parameter: Any, *_: Any) -> None:
        assert parameter.grad is not None, f"{name}: hook fired without a gradient"
        assert parameter.grad.grad_fn is None
        if not parameter.grad_added_to_main_grad or parameter.zero_out_wgrad:
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None
        self.fired[name] += 1


def inputs_of(microbatches: int, dtype: torch.dtype, sequence_parallel: bool = False) -> list[Tensor]:
    from megatron.core import parallel_state

    size, rank = 1, 0
    if sequence_parallel:
        size = parallel_state.get_tensor_model_parallel_world_size()
        rank = parallel_state.get_tensor_model_parallel_rank()
    generator = torch.Generator().manual_seed(5)
    whole = [torch.randn(SEQUENCE * size, BATCH, 8, generator=generator, dtype=dtype) for _ in range(microbatches)]
    return [x.chunk(size)[rank].clone().requires_grad_() for x in whole]


def loss(y: Tensor) -> Tensor:
    """Something whose gradient is neither constant nor contiguous (a sum's is one number, expanded)."""
    return (y.float().sin() * torch.arange(1, y.numel() + 1, device=y.device).view(y.shape)).sum()


def stock(forward: Any, inputs: list[Tensor]) -> list[Tensor]:
    outputs = []
    for x in inputs:
        y = forward(x)
        outputs.append(y.detach().clone())
        loss(y).backward()
    return outputs


def split(
    forward: Any, inputs: list[Tensor], store: WeightGradients, order: str, recomputes: Recomputes | None = None
) -> list[Tensor]:
    losses: dict[int, Tensor] = {}
    outputs = []
    for step in order.split():
        kind, m = step[0], int(step[1:])
        if kind == "F":
            recomputed = recomputes.forward(0, m) if recomputes is not None else contextlib.nullcontext()
            with store.split(0, m), recomputed:
                y = forward(inputs[m])
            outputs.append(y.detach().clone())
            losses[m] = loss(y)
        elif kind == "I":
            with store.input_gradient(0, m):
                losses.pop(m).backward()
        elif kind == "R":
            assert recomputes is not None
            with store.split(0, m):
                recomputes.run(0, m)
        else:
            store.run(0, m)
    store.assert_empty()
    return outputs


def assert_same(name: str, ours: list[Tensor | None], stocks: list[Tensor | None]) -> None:
    for index, (our, stock) in enumerate(zip(ours, stocks, strict=True)):
        if our is None or stock is None:
            assert our is stock, f"{name} {index}: {our} against stock's {stock}"
        else:
            assert our.dtype == stock.dtype and torch.equal(our, stock), f"{name} {index} differs from stock's"


def compare(
    model: Any,
    order: str,
    *,
    main_grad: torch.dtype = torch.float32,
    zero_out: bool = False,
    forward: Any = None,
    inputs: Any = inputs_of,
    bind: Any = None,
    once: bool = True,
    shares: bool = True,
    calls: int = 1,
) -> SimpleNamespace:
    """Run stock and split side by side from one model and check that all gradients are the same bits.

    ``bind`` makes a model's linears split into a store; without it those are Megatron's local ones. Where ``order`` has
    R the whole model is recomputed. Hooks fire as often as stock's: ``once`` for each microbatch. A forward ``shares``
    leaves with the others, as within one call of a schedule, of which there are so many ``calls``.
    """
    from megatron.schedules.integration.linears.local import split_linears
    from megatron.schedules.integration.model_binding import capture_state

    bind = bind or split_linears
    forward = forward or (lambda module, x: module(x))
    dtype = next(model.parameters()).dtype
    sequence_parallel = getattr(model, "sequence_parallel", False)
    microbatches = order.count("F")
    other = copy.deepcopy(model)
    store = WeightGradients()
    split_count = bind(other, store)
    hooks, other_hooks = (MainGrads(module, main_grad, zero_out) for module in (model, other))
    recomputes = Recomputes(capture_state) if "R" in order else None
    if recomputes is not None:
        recompute_layer(other, recomputes)
    names = list(hooks.fired)
    parameters, other_parameters = dict(model.named_parameters()), dict(other.named_parameters())
    for _ in range(calls):
        for parameter in (*model.parameters(), *other.parameters()):
            if parameter.requires_grad:
                parameter.main_grad.zero_()
        x, other_x = (inputs(microbatches, dtype, sequence_parallel) for _ in range(2))
        stocks = stock(partial(forward, model), x)
        with store.keeping_graphs() if shares else contextlib.nullcontext():
            ours = split(partial(forward, other), other_x, store, order, recomputes)
        assert_same("output", ours, stocks)
        assert_same("input gradient", [t.grad for t in other_x], [t.grad for t in x])
        for name in names:
            assert parameters[name].main_grad.abs().sum() > 0, f"{name} has no gradient to compare"
            assert_same(name, [other_parameters[name].main_grad], [parameters[name].main_grad])
            assert other_parameters[name].grad is None
    assert other_hooks.fired == hooks.fired
    assert not once or hooks.fired == dict.fromkeys(names, calls * microbatches)
    return SimpleNamespace(split=split_count, model=other, store=store)


def data_parallel(model: Any, bind: Any, overlap: bool, distributed_optimizer: bool) -> None:
    """Train ``model`` (bf16) a few iterations under Megatron's data parallelism, stock and split, to the same bits."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    ddp = DistributedDataParallelConfig(
        overlap_grad_reduce=overlap,
        use_distributed_optimizer=distributed_optimizer,
        grad_reduce_in_fp32=True,
        bucket_size=200,
    )

    def wrapped(model: Any) -> Any:
        return DistributedDataParallel(config(dtype=torch.bfloat16), ddp, model)

    whole, ours = wrapped(copy.deepcopy(model)), wrapped(model)
    store = WeightGradients()
    assert bind(ours, store) == 3
    rank = torch.distributed.get_rank()
    for iteration in range(3):
        for chunk in (whole, ours):
            chunk.zero_grad_buffer()
        inputs = [x.detach() * (1 + rank + iteration) for x in inputs_of(3, torch.bfloat16)]
        for m, x in enumerate(inputs):
            with _sync(whole, m == 2):
                loss(whole(x)).backward()
        losses: dict[int, Tensor] = {}
        for step in SEVERAL_I_AHEAD.split():
            kind, m = step[0], int(step[1])
            # Gradients that come with I are ready in the last I, those of the linears in the last W.
            with _sync(ours, m == 2):
                if kind == "F":
                    with store.split(0, m):
                        losses[m] = loss(ours(inputs[m]))
                elif kind == "I":
                    with store.input_gradient(0, m):
                        losses.pop(m).backward()
                else:
                    store.run(0, m)
        if overlap and iteration:
            assert all(group.grad_reduce_handle is not None for group in ours.bucket_groups), "reduction started in W"
        for chunk in (whole, ours):
            chunk.finish_grad_sync()
        stock_parameters, our_parameters = (dict(chunk.module.named_parameters()) for chunk in (whole, ours))
        for name, parameter in stock_parameters.items():
            assert parameter.main_grad.abs().sum() > 0
            assert_same(f"iteration {iteration}, {name}", [our_parameters[name].main_grad], [parameter.main_grad])


def _sync(chunk: Any, last: bool) -> Any:
    return contextlib.nullcontext() if last else chunk.no_sync()


def block(**settings: Any) -> Any:
    torch.manual_seed(1)
    bias = settings.pop("bias", True)
    block = Block(config(**settings), bias=bias)
    block.sequence_parallel = settings.get("sequence_parallel", False)
    return block
