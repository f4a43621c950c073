"""The tensors that one forward saves and that are offloaded: found by hooks, copied storage by storage.

A storage that somebody else still holds when the forward has ended stays on the device, because freeing it would free
nothing: parameters, tables and masks that all microbatches share, an output that is being sent, another stage's input.
A storage is moved as a whole and once, however many saved tensors lie in it; afterwards they are views of it again.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.schedules.runtime.activation_meter import ActivationMeter, Hold
from megatron.schedules.runtime.copies import Copies, Copying, Pair
from megatron.schedules.runtime.host_buffers import HostBlock, HostMemory

# Bytes to which each storage is aligned in a block of host memory, whatever its dtype.
_ALIGNED = 512


class _View(NamedTuple):
    """Position of a tensor in its storage; the offset in elements, as torch has it."""

    dtype: torch.dtype
    offset: int | torch.SymInt
    shape: torch.Size
    stride: tuple[int, ...]


class _SavedTensor:
    """Replaces a saved tensor in the graph."""

    __slots__ = ("__weakref__", "hold", "modified", "storage", "tensor", "version", "view")

    def __init__(self, tensor: Tensor, storage: _Storage | None, hold: Hold | None) -> None:
        # Without its grad_fn: see the activation meter's.
        self.tensor: Tensor | None = tensor.detach()
        self.version, self.storage, self.hold = self.tensor._version, storage, hold
        self.view: _View | None = None
        self.modified = False

    def free(self) -> None:
        """Drops the tensor, and keeps its position in the storage."""
        tensor = self.tensor
        assert tensor is not None
        self.view = _View(tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())
        self.modified = tensor._version != self.version
        self.tensor = self.hold = None


class _Storage:
    """A storage that tensors were saved in.

    Attributes:
        part: index of the part of the forward that saved them.
        saved: the tensors.
        size: in bytes, once it is to be moved.
        on_device: all of it, flat: while it is copied to the host, and from L on.
        on_host: its copy on the host.
        hold: counts ``on_device`` in a meter.
    """

    __slots__ = ("hold", "on_device", "on_host", "part", "saved", "size")

    def __init__(self, part: int) -> None:
        self.part = part
        self.saved: list[weakref.ref[_SavedTensor]] = []
        self.size = 0
        self.on_device: Tensor | None = None
        self.on_host: Tensor | None = None
        self.hold: Hold | None = None

    def alive(self) -> Iterator[_SavedTensor]:
        """Yields the tensors that the graph still holds."""
        return (saved for reference in self.saved if (saved := reference()) is not None)


class OffloadedForward:
    """The storages of one forward.

    Attributes:
        bytes: of host memory that they take, known once the forward has ended.
        moved: bytes that leave the device, by part of the forward; known then too.
        back: the copy back, once it has begun.
    """

    def __init__(self, copies: Copies, meter: ActivationMeter | None) -> None:
        self._copies, self._meter = copies, meter
        self._storages: dict[int, _Storage] = {}
        self._moving: list[_Storage] = []
        self._block: HostBlock | None = None
        self._out: Copying | None = None
        self.bytes = 0
        self.moved: list[int] = []
        self.back: Copying | None = None

    def saving(self) -> AbstractContextManager[None]:
        """Surrounds a part of the forward whose activations are offloaded."""
        self.moved.append(0)
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> _SavedTensor:
        hold = None if self._meter is None else self._meter.hold([tensor])
        if not self._movable(tensor):
            return _SavedTensor(tensor, None, hold)
        key = _storage_key(tensor)
        storage = self._storages.get(key)
        # Another storage may have got the address of one that was freed.
        if storage is None or next(storage.alive(), None) is None:
            storage = self._storages[key] = _Storage(len(self.moved) - 1)
        saved = _SavedTensor(tensor, storage, hold)
        storage.saved.append(weakref.ref(saved))
        return saved

    def choose(self, freed_soon: Collection[Tensor]) -> None:
        """Ends the forward: chooses the storages that nobody else holds.

        Args:
            freed_soon: tensors that somebody still holds, but frees at once.
        """
        leaving = {_storage_key(tensor) for tensor in freed_soon}
        for key, storage in self._storages.items():
            saved = list(storage.alive())
            if not saved:
                continue
            assert saved[0].tensor is not None
            memory = saved[0].tensor.untyped_storage()
            # A storage that was resized to nothing will be filled again by whoever did so.
            if memory.nbytes() < max(1, self._copies.smallest):
                continue
            own = sum(1 + (saved_tensor.hold is not None) for saved_tensor in saved)
            if key in leaving or _holders(memory) == own:
                storage.size = memory.nbytes()
                storage.on_device = _flat(memory)
                self._moving.append(storage)
                self.moved[storage.part] += storage.size
        self._storages = {}
        self.bytes = sum(_rounded(storage.size) for storage in self._moving)

    def copy_out(self, block: HostBlock) -> None:
        """Begins to copy to ``block`` once the last copy from it has ended."""
        self._block, offset = block, 0
        pairs: list[Pair] = []
        for storage in self._moving:
            assert storage.on_device is not None
            storage.on_host = block.memory[offset : offset + storage.size]
            pairs.append((storage.on_device, storage.on_host))
            offset += _rounded(storage.size)
        self._out = self._copies.to_host(pairs, block.read_by)

    def free(self) -> None:
        """Frees what was copied, once the copy has ended."""
        if self._out is not None:
            self._out.wait()
        for storage in self._moving:
            for saved in storage.alive():
                saved.free()
            storage.on_device = None

    def copy_back(self, memory: HostMemory) -> None:
        """Allocates device memory, begins to copy back, and releases the host memory to ``memory``."""
        pairs: list[Pair] = []
        for storage in self._moving:
            assert storage.on_host is not None
            if next(storage.alive(), None) is not None:
                storage.on_device = torch.empty(storage.size, dtype=torch.uint8, device=self._copies.device)
                storage.hold = None if self._meter is None else self._meter.hold([storage.on_device])
                pairs.append((storage.on_host, storage.on_device))
            storage.on_host = None
        block, self._block, self._moving = self._block, None, []
        if block is not None:
            self.back = self._copies.from_host(pairs)
            memory.release(block, self.back)

    def _movable(self, tensor: Tensor) -> bool:
        """Returns true for plain memory of the device, which a view with its shape and strides describes fully."""
        return (
            type(tensor) in (Tensor, torch.nn.Parameter)
            and tensor.layout is torch.strided
            and tensor.device.type == self._copies.device.type
            and not tensor.is_conj()
            and not tensor.is_neg()
        )


def _unpack(saved: _SavedTensor) -> Tensor:
    tensor, view = saved.tensor, saved.view
    # Autograd does not check the versions of tensors behind hooks.
    if saved.modified or (tensor is not None and tensor._version != saved.version):
        raise RuntimeError("a tensor needed for a gradient, to be offloaded, was modified in place after it was saved")
    if tensor is not None:
        return tensor
    assert saved.storage is not None and view is not None
    memory = saved.storage.on_device
    if memory is None:
        raise RuntimeError(f"a tensor of shape {tuple(view.shape)} needed for a gradient is offloaded to the host")
    empty = torch.empty(0, dtype=view.dtype, device=memory.device)
    return empty.set_(memory.untyped_storage(), view.offset, view.shape, view.stride)


def _storage_key(tensor: Tensor) -> int:
    """Returns the identity of a tensor's storage while that lives."""
    key: int = tensor.untyped_storage()._cdata
    return key


def _holders(storage: torch.UntypedStorage) -> int:
    """Returns how many tensors lie in ``storage``, whether Python or the graph has them; not counting itself."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count - 1


def _flat(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _rounded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
