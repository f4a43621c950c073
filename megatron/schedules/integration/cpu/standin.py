"""CPU stand-in for CUDA: stock Megatron trains without a GPU, with gloo for messages and tensors on the CPU.

It is for tests, the demo, and laptops, and has local layers only. It refuses to start if CUDA exists.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from megatron.schedules.integration.cpu import gloo_at_exit
from megatron.schedules.integration.gpu_libraries import leave_out_te, use_compiled_helpers

SEE_A_GPU = ["megatron"]
"""Packages for which CUDA is available. For torch itself there is none."""


def needed() -> bool:
    """Returns whether this machine has no CUDA device."""
    return not torch.cuda.is_available()


def enabled() -> bool:
    """Returns whether this process uses the stand-in."""
    return torch.cuda.current_device is _TORCH_CUDA["current_device"]


def enable() -> None:
    """Replaces the parts of ``torch.cuda`` that Megatron uses by CPU equivalents, for the rest of the process; once.

    Raises:
        RuntimeError: CUDA is available, or Megatron was imported before and has kernels to compile for CUDA.
    """
    if not needed():
        raise RuntimeError("the CPU stand-in is for machines without CUDA; this one has it")
    if enabled():
        return
    if "megatron.core" in sys.modules and os.environ.get("TORCHDYNAMO_DISABLE") != "1":
        raise RuntimeError(
            "call megatron.schedules.without_gpu() before Megatron is imported, or set TORCHDYNAMO_DISABLE=1"
        )
    # Read when Megatron decorates its fused functions: compiling takes longer than a small job. 0 compiles them.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron requires it for some options
    leave_out_te()
    # Imported before anything is replaced: torch's compiler records torch's own functions at import.
    import megatron.training  # noqa: F401

    for name, replacement in (_TORCH_CUDA | _TORCH_CUDA_RANDOM).items():
        setattr(torch.cuda, name, replacement)
    for name, replacement in _TORCH_CUDA_RANDOM.items():
        setattr(torch.cuda.random, name, replacement)
    _replace_in_megatron()
    _replace_adam()
    OnTheCpu().__enter__()
    BackwardCFunction.apply = _in_backward(BackwardCFunction.apply)  # type: ignore[method-assign]
    gloo_at_exit.wait_at_exit()
    if os.environ.get("RANK", "0") == "0":
        said = "no CUDA device here: Megatron runs on the CPU through a stand-in (tests and demos only)"
        sys.stdout.write(f"pipeline schedule: {said}\n")


def _called_by_megatron() -> bool:
    """Returns whether the caller must see a GPU. Torch itself must see that there is no CUDA."""
    name = str(sys._getframe(2).f_globals.get("__name__", ""))
    return name.partition(".")[0] in SEE_A_GPU and not name.startswith("megatron.schedules.")


def _none(*args: Any, **kwargs: Any) -> None: ...


def _returning(value: Any) -> Callable[..., Any]:
    """Returns a new function of any arguments: torch's compiler tells the functions of torch apart by identity."""
    return lambda *args, **kwargs: value


class _Stream:
    """Stream without work: work on the CPU is done when the call returns."""

    cuda_stream = 0
    device = torch.device("cpu")
    wait_stream = wait_event = synchronize = _none

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: Any) -> None: ...


class _Event:
    wait = synchronize = _none

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._time = 0.0

    def record(self, *args: Any) -> None:
        self._time = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Event) -> float:
        return 1000 * (other._time - self._time)


class _Properties:
    """Properties of a device too old for special kernels."""

    name = "CPU"
    multi_processor_count = 1
    total_memory = 1 << 34
    major, minor = 8, 0


_MEMORY_STATISTICS = (
    *(f"{what}_bytes.all.{when}" for what in ("allocated", "reserved") for when in ("current", "peak")),
    *("allocation.all.current", "active_bytes.all.peak", "num_alloc_retries"),
)
_DO_NOTHING = ("set_device", "synchronize", "empty_cache", "ipc_collect", "set_stream", "reset_peak_memory_stats")
_ZERO = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "device_memory_used")

_TORCH_CUDA: dict[str, Callable[..., Any]] = {
    **{name: _returning(None) for name in _DO_NOTHING},
    **{name: _returning(0) for name in _ZERO},
    "is_available": lambda: _called_by_megatron(),
    "device_count": lambda: 1 if _called_by_megatron() else 0,
    "current_device": lambda: "cpu",
    "device": lambda *args, **kwargs: nullcontext(),
    "Stream": _Stream,
    "Event": _Event,
    "stream": lambda stream: stream or _Stream(),
    "current_stream": lambda *args: _Stream(),
    "default_stream": lambda *args: _Stream(),
    "is_current_stream_capturing": lambda: False,
    "get_device_properties": lambda *args: _Properties(),
    "get_device_capability": lambda *args: (_Properties.major, _Properties.minor),
    "get_device_name": lambda *args: "CPU",
    "memory_stats": lambda *args: dict.fromkeys(_MEMORY_STATISTICS, 0),
    "mem_get_info": lambda *args: (1 << 34, 1 << 34),
}

_TORCH_CUDA_RANDOM: dict[str, Callable[..., Any]] = {
    "manual_seed": lambda seed: torch.random.default_generator.manual_seed(int(seed)),
    "manual_seed_all": lambda seed: torch.random.default_generator.manual_seed(int(seed)),
    "get_rng_state": lambda *args, **kwargs: torch.random.get_rng_state(),
    "set_rng_state": lambda state, *args, **kwargs: torch.random.set_rng_state(state),
    "initial_seed": lambda: torch.random.initial_seed(),
}


def _replace_in_megatron() -> None:
    """Replaces code in Megatron that bypasses ``torch.cuda``'s functions or requires a GPU machine."""
    from megatron.core.datasets import utils as dataset_utils
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer import torch_norm
    from megatron.core.transformer.moe import token_dispatcher

    def moved_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        # Stock moves a tensor from the GPU. A tensor on the CPU must be returned in the same form.
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    def set_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
        torch.random.set_rng_state(new_state)

    def get_state(device: Any = "cpu", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.random.get_rng_state()

    stock_norm = torch_norm.WrappedTorchNorm.__new__

    def norm(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **rest: Any) -> Any:
        if not config.sequence_parallel:
            return stock_norm(cls, config, hidden_size, eps, **rest)
        # Only the norms of Apex and Transformer Engine, both for GPUs, mark their parameters for sequence parallelism.
        plain = copy.copy(config)
        plain.sequence_parallel = False
        built = stock_norm(cls, plain, hidden_size, eps, **rest)
        for parameter in built.parameters():
            parameter.sequence_parallel = True
        return built

    torch_norm.WrappedTorchNorm.__new__ = norm
    token_dispatcher.maybe_move_tensor_to_cpu = moved_to_cpu
    megatron_random._set_cuda_rng_state = set_state
    megatron_random._get_cuda_rng_state = get_state
    use_compiled_helpers(dataset_utils)


def _on_cpu(value: Any) -> Any:
    """Returns the CPU for a CUDA device; other values unchanged."""
    name = value.type if isinstance(value, torch.device) else value
    return "cpu" if isinstance(name, str) and name.startswith("cuda") else value


def making_on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``make``, a function of torch that makes a tensor, with the CPU for a CUDA device.

    For code that :class:`OnTheCpu` does not watch.
    """

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return make(*args, **kwargs)

    return made


_REPLACED = frozenset((torch.Tensor.cuda, torch.Tensor.pin_memory, torch.Tensor.type, torch.Tensor.to))
# Generator for random numbers that a GPU machine draws on the CPU. The default generator here replaces the GPU's.
_HOST_NUMBERS = torch.Generator()


class OnTheCpu(TorchFunctionMode):
    """Replaces the CUDA device by the CPU in every torch call."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs and func not in _REPLACED:  # nearly all: soon done
            return func(*args)
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.random_ and kwargs.get("generator", self) is None:
            # A data loader draws a seed. This must not change the random numbers of dropout.
            kwargs = {**kwargs, "generator": _HOST_NUMBERS}
        if func is torch.Tensor.type:
            return cuda_type(func, args, kwargs)
        if func is torch.Tensor.to:
            args = tuple(map(_on_cpu, args))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _on_cpu(kwargs["device"])}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


def _in_backward(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``apply`` of a Python autograd function's node to use the mode, which torch disables in a backward."""

    @functools.wraps(apply)
    def applied(*args: Any) -> Any:
        if torch._C._len_torch_function_stack():
            return apply(*args)
        with OnTheCpu():
            return apply(*args)

    return applied


def cuda_type(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns the CUDA type that the optimizer expects; keeps ``tensor.type("torch.cuda...")`` on the CPU."""
    if len(args) == 1 and not kwargs:
        return str(func(args[0])).replace("torch.", "torch.cuda.")
    wanted = args[1]
    if isinstance(wanted, str):
        wanted = wanted.replace("torch.cuda.", "torch.")
    return func(args[0], wanted, *args[2:], **kwargs)


class _StepInGroup(torch.optim.Optimizer):
    """Mixin for torch's optimizers: bitwise the same update, with ``step`` in the parameter groups.

    Adam of Transformer Engine and Apex stores one number of steps per parameter group; torch stores a tensor per
    parameter. With torch's Adam, stock's distributed optimizer cannot resume (``docs/upstream.md`` says why), and
    checkpoints would take another code path through stock than on machines with a GPU.
    """

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            done = group.get("step", 0)
            group["step"] = done + 1
            for parameter in group["params"]:
                if self.state.get(parameter):
                    self.state[parameter]["step"] = torch.tensor(float(done))
        result = super().step(closure)
        self._forget_steps()
        return result

    def __setstate__(self, state: dict[str, Any]) -> None:
        for values in filter(None, state["state"].values()):
            values.setdefault("step", torch.tensor(0.0))  # torch reads it when it fills in missing defaults
        super().__setstate__(state)
        self._forget_steps()

    def _forget_steps(self) -> None:
        for values in self.state.values():
            values.pop("step", None)


class _Adam(_StepInGroup, torch.optim.Adam): ...


class _AdamW(_StepInGroup, torch.optim.AdamW): ...


def adam(*args: Any, adam_w_mode: bool = True, **kwargs: Any) -> torch.optim.Optimizer:
    """Replaces the GPU libraries' ``FusedAdam``."""
    return (_AdamW if adam_w_mode else _Adam)(*args, **kwargs)


def _replace_adam() -> None:
    """Makes Megatron use :func:`adam` and save it in checkpoints like Apex's Adam."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    if not optimizer.USING_PYTORCH_OPTIMIZER:
        return
    optimizer.Adam = adam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
