"""Counts the bytes of activations that the autograd graph and deferred weight gradients hold."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class ActivationMeter:
    """Bytes of saved tensors on this rank, now and at the peak, each storage counted once.

    A tensor counts from the moment an operation inside :meth:`recording` saves it for its backward until the graph
    frees it, and from :meth:`hold` until :meth:`Hold.release`. Plain attributes of a function's ``ctx`` are invisible,
    and so are tensors saved under other ``saved_tensors_hooks`` inside the recording.

    For tests and measurements, not for training: every saved tensor costs two calls into Python, and as under any such
    hook a saved parameter loses its attributes, such as those that fused gradient accumulation reads.

    Args:
        exclude: tensors whose storages never count, usually the model's parameters and buffers. The storages are looked
            up at the start of each recording, because optimizers move parameters into buffers.
    """

    def __init__(self, exclude: Iterable[Tensor] = ()) -> None:
        self._exclude = tuple(exclude)
        self._excluded: set[int] = set()
        self._entries: dict[int, _MeteredStorage] = {}
        self._bytes = 0
        self._peak = 0
        # The graph may be freed in a thread of autograd's, and garbage collection may free it in the middle of our own
        # bookkeeping: hence a reentrant lock.
        self._lock = threading.RLock()

    @property
    def current(self) -> int:
        """Bytes now. Storages that were resized after saving count with their present size."""
        with self._lock:
            self._measure()
            return self._bytes

    @property
    def peak(self) -> int:
        """The most bytes at once so far."""
        return self._peak

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Counts what forwards in the block save. Use it for backwards too if they recompute."""
        self._excluded = {key for tensor in self._exclude if (key := _storage_key(tensor)) is not None}
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            yield

    def hold(self, tensors: Iterable[Tensor]) -> Hold:
        """Counts ``tensors`` until the returned hold is released."""
        return Hold([self._pack(tensor) for tensor in tensors])

    def _pack(self, tensor: Tensor) -> _MeteredTensor:
        key = _storage_key(tensor)
        if key is None or key in self._excluded:
            return _MeteredTensor(None, tensor, 0)
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = _MeteredStorage(tensor.untyped_storage())
                self._change(entry.bytes)
            entry.holders += 1
        return _MeteredTensor(self, tensor, key)

    def _drop(self, key: int) -> None:
        with self._lock:
            entry = self._entries[key]
            entry.holders -= 1
            if not entry.holders:
                del self._entries[key]
                self._change(-entry.bytes)

    def _change(self, change: int) -> None:
        self._bytes += change
        if self._bytes > self._peak:
            # Outputs that Megatron discards for recompute shrink after they were saved. Measuring only at a new peak
            # keeps the peak exact without a walk over all storages at each save.
            self._measure()
            self._peak = max(self._peak, self._bytes)

    def _measure(self) -> None:
        total = 0
        for entry in self._entries.values():
            entry.bytes = entry.storage.nbytes()
            total += entry.bytes
        self._bytes = total


class Hold:
    """Tensors that a meter counts although no graph saves them; see :meth:`ActivationMeter.hold`."""

    __slots__ = ("_saved",)

    def __init__(self, saved: list[_MeteredTensor]) -> None:
        self._saved = saved

    def release(self) -> None:
        """Stops counting; a second call does nothing."""
        self._saved.clear()


class _MeteredStorage:
    """One storage: its bytes when last measured, and how many saved tensors lie in it."""

    __slots__ = ("bytes", "holders", "storage")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self.bytes = storage.nbytes()
        self.holders = 0


class _MeteredTensor:
    """Replaces a saved tensor in the graph. Tells the meter when the graph frees it."""

    __slots__ = ("key", "meter", "tensor", "version")

    def __init__(self, meter: ActivationMeter | None, tensor: Tensor, key: int) -> None:
        self.meter = meter
        # Without its grad_fn, which autograd keeps by itself: an output saved by its own operation would otherwise
        # hold the operation that holds it, and never be freed. It shares the version counter.
        self.tensor = tensor.detach()
        self.key = key
        # Not the tensor's own: that of a quantized weight is another than its detached form's.
        self.version = self.tensor._version

    def __del__(self) -> None:
        if self.meter is not None:
            self.meter._drop(self.key)


def _unpack(saved: _MeteredTensor) -> Tensor:
    # Autograd does not check the versions of tensors behind hooks.
    if saved.tensor._version != saved.version:
        raise RuntimeError(
            f"a tensor of shape {tuple(saved.tensor.shape)} needed for a gradient was modified in place: "
            f"it was saved at version {saved.version} and is at version {saved.tensor._version}"
        )
    return saved.tensor


def _storage_key(tensor: Tensor) -> int | None:
    """Returns the identity of a tensor's storage, valid while the storage exists.

    None if the tensor has no single storage: it is sparse, or its class keeps the numbers in other tensors, such as a
    weight's quantized copy. Activations in FP8 are saved as those other tensors.
    """
    if tensor.layout != torch.strided or type(tensor) not in (Tensor, torch.nn.Parameter):
        return None
    return tensor.untyped_storage()._cdata
