"""Counts the bytes of activations that the autograd graph and deferred weight gradients really hold."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class ActivationMeter:
    """Bytes of saved tensors held on this rank, now and at the worst moment, each storage counted once.

    A tensor counts from the moment an operation inside :meth:`recording` saves it for its backward until the
    graph lets it go, and from :meth:`hold` until :meth:`Hold.release`. Views share a storage and count once,
    with the whole storage, since that is what stays allocated. What a Python function keeps as a plain
    attribute of its ``ctx`` instead of through ``save_for_backward`` is invisible here, and so is whatever is
    saved under another ``saved_tensors_hooks`` inside the recording (autograd applies the innermost hooks
    only).

    Meant for tests and measurements, not for training: every saved tensor costs two calls into Python. It
    also takes the Python identity from saved parameters, as any such hook does: autograd hands out a copy of what
    a hook gives back, without attributes. A backward that looks for them on the weight it saved, as those of fused
    gradient accumulation do, has to be told otherwise; the local linears are.

    Args:
        exclude: tensors whose storages never count, usually ``model.parameters()`` and ``model.buffers()``.
            The storages are looked up at the start of each recording, for optimizers move parameters into
            buffers.
        timeline: also keep ``samples``, a list of (``time.perf_counter()`` seconds, bytes), one a change.
    """

    def __init__(self, exclude: Iterable[Tensor] = (), *, timeline: bool = False) -> None:
        self._exclude = tuple(exclude)
        self._excluded: set[int] = set()
        self._entries: dict[int, _Entry] = {}
        self._bytes = 0
        self._peak = 0
        # The graph may be freed in one of autograd's own threads, and a collection may free it in the middle
        # of our own bookkeeping: hence a lock, and one that its owner may take again.
        self._lock = threading.RLock()
        self._timeline = timeline
        self.samples: list[tuple[float, int]] = []

    @property
    def current(self) -> int:
        """Bytes held now; storages that were resized since they were saved count with their present size."""
        with self._lock:
            self._measure()
            return self._bytes

    @property
    def peak(self) -> int:
        """The most bytes held at once since construction or the last :meth:`reset_peak`."""
        return self._peak

    def reset_peak(self) -> None:
        """Start a new peak from what is held now, and forget the samples."""
        with self._lock:
            self._measure()
            self._peak = self._bytes
            self.samples.clear()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Count what is saved by forwards inside; put it round backwards too if they recompute."""
        self._excluded = {key for tensor in self._exclude if (key := _storage_key(tensor)) is not None}
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            yield

    def hold(self, tensors: Iterable[Tensor]) -> Hold:
        """Count ``tensors`` until the returned hold is released."""
        return Hold([self._pack(tensor) for tensor in tensors])

    def _pack(self, tensor: Tensor) -> _Saved:
        key = _storage_key(tensor)
        if key is None or key in self._excluded:
            return _Saved(None, tensor, 0)
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = _Entry(tensor.untyped_storage())
                self._change(entry.bytes)
            entry.holders += 1
        return _Saved(self, tensor, key)

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
            # Outputs that Megatron discards for recompute shrink after they were saved. Looking only when a
            # new peak is claimed keeps the peak exact without a walk over all storages at each save.
            self._measure()
            self._peak = max(self._peak, self._bytes)
        if self._timeline:
            self.samples.append((time.perf_counter(), self._bytes))

    def _measure(self) -> None:
        total = 0
        for entry in self._entries.values():
            entry.bytes = entry.storage.nbytes()
            total += entry.bytes
        self._bytes = total


class Hold:
    """Tensors that a meter counts although no graph saves them; made by :meth:`ActivationMeter.hold`."""

    __slots__ = ("_saved",)

    def __init__(self, saved: list[_Saved]) -> None:
        self._saved = saved

    def release(self) -> None:
        """Stop counting; a second call does nothing."""
        self._saved.clear()


class _Entry:
    """One storage that is held: its bytes when last looked at, and how many saved tensors lie in it."""

    __slots__ = ("bytes", "holders", "storage")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self.bytes = storage.nbytes()
        self.holders = 0


class _Saved:
    """What stands in the graph for a saved tensor; its end tells the meter that the graph let go."""

    __slots__ = ("key", "meter", "tensor", "version")

    def __init__(self, meter: ActivationMeter | None, tensor: Tensor, key: int) -> None:
        self.meter = meter
        # Without its grad_fn, which autograd keeps by itself: an output saved by its own operation would
        # otherwise hold the operation that holds it, and never be freed. Version counters are shared with the
        # original.
        self.tensor = tensor.detach()
        self.key = key
        self.version = tensor._version

    def __del__(self) -> None:
        if self.meter is not None:
            self.meter._drop(self.key)


def _unpack(saved: _Saved) -> Tensor:
    # Autograd leaves out its own version check for tensors behind hooks, so it is made up for here.
    if saved.tensor._version != saved.version:
        raise RuntimeError(
            f"a tensor of shape {tuple(saved.tensor.shape)} needed for a gradient was modified in place: "
            f"it was saved at version {saved.version} and is at version {saved.tensor._version}"
        )
    return saved.tensor


def _storage_key(tensor: Tensor) -> int | None:
    """The identity of a tensor's storage while that lives; None where there is no single storage (sparse)."""
    if tensor.layout != torch.strided:
        return None
    return tensor.untyped_storage()._cdata
