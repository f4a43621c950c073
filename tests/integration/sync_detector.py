"""Finds what would make a GPU's host wait: reads of device tensors, copies to it and back, where there is no GPU.

A tensor counts as the device's unless it was made in host memory: by a factory without a ``device``, or from tensors
that were. An autograd function gets another tensor with the same memory. What a GPU itself says of the same programs:
``scripts/run_gpu_tests.sh``.

Torch has no function mode active inside a backward, so the detector enters itself there again: round the backwards of
Python's autograd functions, and round each read of a tensor that a hook may make.
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from megatron.schedules.integration.cpu import standin

_READING_METHODS = (
    *("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__repr__", "__array__"),
    *("nonzero", "masked_select", "unique", "unique_consecutive", "is_nonzero", "equal", "allclose", "bincount"),
)
_READS = {getattr(Tensor, name) for name in _READING_METHODS} | {
    torch.nonzero,
    torch.masked_select,
    torch.unique,
    torch.equal,
    torch.allclose,
    torch.is_nonzero,
    torch.bincount,
}
# Torch's own, which a stand-in may have wrapped.
_TORCH: Any = torch._C._VariableFunctions
_FROM_PYTHON = {_TORCH.tensor, _TORCH.as_tensor}
_FACTORIES = _FROM_PYTHON | {
    *(_TORCH.zeros, _TORCH.ones, _TORCH.empty, _TORCH.full, _TORCH.arange, _TORCH.eye, _TORCH.linspace, _TORCH.rand),
    *(_TORCH.randn, _TORCH.randint, _TORCH.randperm),
}


class _Cuda(str):
    """What ``torch.cuda.current_device()`` gives under the stand-in, known from a plain "cpu"."""


class SyncDetector(TorchFunctionMode):
    """While it is active, every call that a GPU's host would wait in is noted, with the line that made it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._host: Any = WeakIdKeyDictionary()
        self._memory: dict[int, weakref.ref[Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, func = kwargs or {}, getattr(func, "stock", func)
        tensors = list(_tensors((args, kwargs)))
        on_host = bool(tensors) and all(map(self._is_host, tensors))
        result = func(*args, **kwargs)
        if func in _FACTORIES:
            on_device = _is_device(kwargs.get("device"))
            if on_device and func in _FROM_PYTHON and (on_host or not tensors):
                self._note(f"{func.__name__} copies a number to the device")
            self._put(result, host=not on_device)
        elif func is Tensor.cuda or (func is Tensor.to and any(map(_is_device, (*args[1:], *kwargs.values())))):
            if on_host and not kwargs.get("non_blocking", False):
                self._note(f"{func.__name__} copies to the device")
            self._put(result, host=False)
        elif func is Tensor.to and any(isinstance(arg, str) for arg in (*args[1:], kwargs.get("device"))):
            if not on_host:
                self._note("to copies to the host")
            self._put(result, host=True)
        elif func is Tensor.copy_ and self._is_host(args[1]) and not self._is_host(args[0]):
            if not kwargs.get("non_blocking", False):
                self._note("copy_ copies to the device")
        elif func in _READS or _by_mask(func, args):
            if not on_host:
                self._note(f"{func.__name__} reads what is on the device")
            self._put(result, host=True)
        elif on_host:
            self._put(result, host=True)
        return result

    def _put(self, result: Any, *, host: bool) -> None:
        for tensor in _tensors(result):
            if host:
                self._host[tensor] = True
                self._memory[_address(tensor)] = weakref.ref(tensor)
            else:
                self._memory.pop(_address(tensor), None)
                if tensor in self._host:
                    del self._host[tensor]

    def _is_host(self, tensor: Tensor) -> bool:
        if tensor in self._host:
            return True
        known = self._memory.get(_address(tensor), lambda: None)()
        return known is not None and known in self._host

    def _note(self, what: str) -> None:
        at = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and __file__ != f.filename][-3:]
        self.found.append(f"{what}: " + " < ".join(f"{f.filename}:{f.lineno} {f.line}" for f in reversed(at)))

    def in_host_memory(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """``make``, which torch does not ask about, and whose tensors are the host's: states of random numbers."""

        def made(*args: Any, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            self._put(tensor, host=True)
            return tensor

        return made

    def in_backward(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        """``apply`` of a Python autograd function's node, with the modes that are active outside of a backward."""

        def applied(*args: Any) -> Any:
            with standin.OnTheCpu() if standin.enabled() else nullcontext(), self:
                return apply(*args)

        return applied

    def in_hooks(self, read: Callable[..., Any]) -> Callable[..., Any]:
        """A method that reads a tensor, noted where no mode is active as well."""

        def reading(*args: Any, **kwargs: Any) -> Any:
            if torch._C._len_torch_function_stack():
                return read(*args, **kwargs)
            with self:
                return read(*args, **kwargs)

        reading.stock = read  # type: ignore[attr-defined]
        return reading

    def waits(self, *args: Any, **kwargs: Any) -> None:
        """Stands for what waits by its name: ``synchronize``."""
        self._note("synchronize waits for the device")


@contextmanager
def detected() -> Iterator[SyncDetector]:
    """A detector that is active meanwhile."""
    detector = SyncDetector()
    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch.cuda, "current_device", lambda: _Cuda("cpu")),
        (torch, "get_rng_state", detector.in_host_memory(torch.get_rng_state)),
        (BackwardCFunction, "apply", detector.in_backward(BackwardCFunction.apply)),
        *((owner, "synchronize", detector.waits) for owner in (torch.cuda, torch.cuda.Event, torch.cuda.Stream)),
        *((Tensor, name, detector.in_hooks(getattr(Tensor, name))) for name in _READING_METHODS),
    ]
    with ExitStack() as stack:
        for owner, name, replacement in replaced:
            stack.enter_context(patch.object(owner, name, replacement))
        stack.enter_context(detector)
        yield detector


def _address(tensor: Tensor) -> int:
    """Where its memory begins; where it has none of its own, a number that no memory has."""
    try:
        return tensor.untyped_storage().data_ptr() or -id(tensor)
    except (NotImplementedError, RuntimeError):
        return -id(tensor)


def _is_device(device: Any) -> bool:
    """Whether an argument names the GPU. Under the stand-in a tensor's own device is "cpu", and is taken for it."""
    if isinstance(device, _Cuda | torch.device):
        return True
    return isinstance(device, str) and device.startswith("cuda")


def _by_mask(func: Any, args: Any) -> bool:
    """Whether it picks as many elements as a mask says, a number that the host has to know."""
    if func is not Tensor.__getitem__:
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(part, Tensor) and part.dtype is torch.bool for part in index)


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
