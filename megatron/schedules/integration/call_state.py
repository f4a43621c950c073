"""State that a training call reads and changes, so that the same call can be run again: all but the weights."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

Chunks = Sequence[torch.nn.Module]
Restore = Callable[[], None]

# Where Transformer Engine's modules keep scales and histories of delayed scaling: not among their buffers.
_SCALING = ("scaling_fwd", "scaling_bwd")


def captured(chunks: Chunks) -> Restore:
    """Captures the state before a training call; returns a function that restores it, any number of times.

    Args:
        chunks: this rank's model chunks, wrapped or not.
    """
    parts = [_random_states(), _module_states(chunks), _scales(chunks), _gradients(chunks)]

    def restore() -> None:
        with torch.no_grad():
            for part in parts:
                part()

    return restore


def gradient_of(parameter: Tensor) -> Tensor | None:
    """The gradient that an optimizer reads: Megatron's ``main_grad`` if there is one."""
    main = getattr(parameter, "main_grad", None)
    return parameter.grad if main is None else main


class Replayed:
    """Reads each sample of ``source`` once, and hands out copies again after :meth:`rewind`.

    All other attributes are those of the source. Samples that cannot be copied are handed out themselves.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self._source, self._samples, self._next = source, list[Any](), 0

    def rewind(self) -> None:
        """Begins again with the first sample."""
        self._next = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._next == len(self._samples):
            self._samples.append(next(self._source))
        self._next += 1
        return _copied(self._samples[self._next - 1])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def replayed(iterators: Sequence[Any]) -> list[Any]:
    """Wraps each iterator of the chunks once, even if several share it. Other values do not change."""
    wrapped = {id(iterator): Replayed(iterator) for iterator in iterators if hasattr(iterator, "__next__")}
    return [wrapped.get(id(iterator), iterator) for iterator in iterators]


def _copied(sample: Any) -> Any:
    try:
        return copy.deepcopy(sample)
    except Exception:
        return sample


def _random_states() -> Restore:
    """Random states of Python, numpy, torch on the host and on the device, and those of Megatron by name."""
    python, array, host = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    device, tracker = torch.cuda.get_rng_state(), get_cuda_rng_tracker()
    # With CUDA graphs a state is a generator, which changes in place.
    named = {
        name: (state, state.get_state() if isinstance(state, torch.Generator) else state.clone())
        for name, state in tracker.get_states().items()
    }

    def restore() -> None:
        random.setstate(python)
        numpy.random.set_state(array)
        torch.set_rng_state(host)
        torch.cuda.set_rng_state(device)
        for state, value in named.values():
            if isinstance(state, torch.Generator):
                state.set_state(value)
        if named:
            tracker.set_states(
                {n: state if isinstance(state, torch.Generator) else v.clone() for n, (state, v) in named.items()}
            )

    return restore


def _module_states(chunks: Chunks) -> Restore:
    """Buffers of modules, and their attributes that are plain tensors or numbers."""
    saved: list[tuple[dict[str, Any], str, Any, Any]] = []
    for module in chain.from_iterable(chunk.modules() for chunk in chunks):
        for values in (module._buffers, vars(module)):
            for name, value in values.items():
                if type(value) in (int, float) or (value is None and values is module._buffers):
                    saved.append((values, name, value, None))
                elif isinstance(value, Tensor) and (values is module._buffers or type(value) is Tensor):
                    saved.append((values, name, value, value.detach().clone()))

    def restore() -> None:
        for values, name, value, copied in saved:
            values[name] = value
            if copied is not None:
                value.detach().copy_(copied)

    return restore


def _scales(chunks: Chunks) -> Restore:
    """Scales and maxima of Transformer Engine's delayed scaling, also of modules that have none before the call."""
    metas = [vars(module).get("fp8_meta") for chunk in chunks for module in chunk.modules()]
    states = [(meta, key) for meta in metas if isinstance(meta, dict) for key in _SCALING]
    saved = [
        [(t, t.clone()) for t in vars(meta[key]).values() if isinstance(t, Tensor)] if key in meta else None
        for meta, key in states
    ]

    def restore() -> None:
        for (meta, key), tensors in zip(states, saved, strict=True):
            for tensor, value in tensors or ():
                tensor.copy_(value)
            if tensors is None and hasattr(meta.get(key), "amax_history"):
                meta[key].scale.fill_(1)
                meta[key].amax_history.zero_()

    return restore


def _gradients(chunks: Chunks) -> Restore:
    """Gradients, and data parallelism's marks of them. Those that are not zero are copied to the host."""
    by_identity = {id(parameter): parameter for chunk in chunks for parameter in chunk.parameters()}
    parameters: list[Any] = list(by_identity.values())
    wrappers: list[Any] = [chunk for chunk in chunks if hasattr(chunk, "zero_grad_buffer")]
    marks = [getattr(parameter, "grad_added_to_main_grad", None) for parameter in parameters]
    own = [(parameter.grad, _on_host(parameter.grad)) for parameter in parameters]
    main = [_on_host(getattr(parameter, "main_grad", None)) for parameter in parameters]

    def restore() -> None:
        for wrapper in wrappers:
            wrapper.zero_grad_buffer()
        for parameter, mark, (grad, value), main_value in zip(parameters, marks, own, main, strict=True):
            if mark is not None:
                parameter.grad_added_to_main_grad = mark
            parameter.grad = grad
            for gradient, before in ((grad, value), (getattr(parameter, "main_grad", None), main_value)):
                if gradient is not None:
                    gradient.zero_() if before is None else gradient.copy_(before)

    return restore


def _on_host(gradient: Tensor | None) -> Tensor | None:
    """A copy on the host; None for a gradient that is missing or zero."""
    if gradient is None or not gradient.any():
        return None
    return gradient.detach().to("cpu", copy=True)
