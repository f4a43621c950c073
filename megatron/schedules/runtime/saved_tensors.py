"""What one forward saved in parts of it that go to the host: found by hooks, copied there and back, storage by storage.

What somebody else holds when the forward has ended stays where it is, for to let go of it would free nothing:
parameters, tables and masks that all microbatches share, an output that is being sent, an input that another stage has.
A storage is moved as a whole and once, whatever number of saved tensors lie in it; those are views of it again after.
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
from megatron.schedules.runtime.host_buffers import Block, HostMemory

# Of each storage's place in a block of host memory, whatever its dtype.
_ALIGNED = 512


class _Place(NamedTuple):
    """Where a tensor lies in its storage; the offset in elements, as torch has it."""

    dtype: torch.dtype
    offset: int | torch.SymInt
    shape: torch.Size
    stride: tuple[int, ...]


class _Saved:
    """What stands in the graph for a saved tensor."""

    __slots__ = ("__weakref__", "hold", "home", "modified", "place", "tensor", "version")

    def __init__(self, tensor: Tensor, home: _Home | None, hold: Hold | None) -> None:
        # Without its grad_fn: see the activation meter's.
        self.tensor: Tensor | None = tensor.detach()
        self.version, self.home, self.hold = tensor._version, home, hold
        self.place: _Place | None = None
        self.modified = False

    def leave(self) -> None:
        """Let go of the tensor, and remember where it lay."""
        tensor = self.tensor
        assert tensor is not None
        self.place = _Place(tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())
        self.modified = tensor._version != self.version
        self.tensor = self.hold = None


class _Home:
    """A storage that tensors were saved in."""

    __slots__ = ("bytes", "copied", "hold", "saved", "size")

    def __init__(self) -> None:
        self.saved: list[weakref.ref[_Saved]] = []
        self.size = 0
        self.bytes: Tensor | None = None
        """All of it, flat: while it is copied from, and from L on."""
        self.copied: Tensor | None = None
        """Its copy on the host."""
        self.hold: Hold | None = None

    def alive(self) -> Iterator[_Saved]:
        """What the graph still holds of what was saved in it."""
        return (saved for each in self.saved if (saved := each()) is not None)


class Trip:
    """The storages of one forward.

    Args:
        copies: carries them.
        meter: also counts them while they are on the device; None counts nothing.

    Attributes:
        bytes: of host memory that they take, known once the forward has ended.
        back: the copy back, once it has been begun.
    """

    def __init__(self, copies: Copies, meter: ActivationMeter | None) -> None:
        self._copies, self._meter = copies, meter
        self._homes: dict[int, _Home] = {}
        self._moving: list[_Home] = []
        self._block: Block | None = None
        self.bytes = 0
        self._out: Copying | None = None
        self.back: Copying | None = None

    def saving(self) -> AbstractContextManager[None]:
        """Round a part of the forward whose activations go."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> _Saved:
        hold = None if self._meter is None else self._meter.hold([tensor])
        if not self._movable(tensor):
            return _Saved(tensor, None, hold)
        key = _storage_key(tensor)
        home = self._homes.get(key)
        # Of a storage that was freed again another one may have the place.
        if home is None or next(home.alive(), None) is None:
            home = self._homes[key] = _Home()
        saved = _Saved(tensor, home, hold)
        home.saved.append(weakref.ref(saved))
        return saved

    def settle(self, given_up: Collection[Tensor]) -> None:
        """The forward has ended: find out what can go, for nobody else holds it.

        Args:
            given_up: what somebody still holds, but not for long.
        """
        leaving = {_storage_key(tensor) for tensor in given_up}
        for key, home in self._homes.items():
            saved = list(home.alive())
            if not saved:
                continue
            assert saved[0].tensor is not None
            storage = saved[0].tensor.untyped_storage()
            # A storage that was resized to nothing will be filled again by whoever did so.
            if storage.nbytes() < max(1, self._copies.smallest):
                continue
            own = sum(1 + (each.hold is not None) for each in saved)
            if key in leaving or _holders(storage) == own:
                home.size = storage.nbytes()
                home.bytes = _flat(storage)
                self._moving.append(home)
        self._homes = {}
        self.bytes = sum(_rounded(home.size) for home in self._moving)

    def begin(self, block: Block) -> None:
        """Begin to copy to ``block``, once that has been read."""
        self._block, offset = block, 0
        pairs: list[Pair] = []
        for home in self._moving:
            assert home.bytes is not None
            home.copied = block.memory[offset : offset + home.size]
            pairs.append((home.bytes, home.copied))
            offset += _rounded(home.size)
        self._out = self._copies.to_host(pairs, block.read_by)

    def leave(self) -> None:
        """Let go of what was copied, once the copy has ended."""
        if self._out is not None:
            self._out.wait()
        for home in self._moving:
            for saved in home.alive():
                saved.leave()
            home.bytes = None

    def come_back(self, memory: HostMemory) -> None:
        """Take device memory, begin to copy back, and give the host memory back to ``memory``."""
        pairs: list[Pair] = []
        for home in self._moving:
            assert home.copied is not None
            if next(home.alive(), None) is not None:
                home.bytes = torch.empty(home.size, dtype=torch.uint8, device=self._copies.device)
                home.hold = None if self._meter is None else self._meter.hold([home.bytes])
                pairs.append((home.copied, home.bytes))
            home.copied = None
        block, self._block, self._moving = self._block, None, []
        if block is not None:
            self.back = self._copies.from_host(pairs)
            memory.give_back(block, self.back)

    def arrive(self) -> None:
        """Whatever comes from now on finds it on the device."""
        if self.back is not None:
            self.back.wait()

    def _movable(self, tensor: Tensor) -> bool:
        """Whether it is plain memory of the device, which a view with its shape and strides says all about."""
        return (
            type(tensor) in (Tensor, torch.nn.Parameter)
            and tensor.layout is torch.strided
            and tensor.device.type == self._copies.device.type
            and not tensor.is_conj()
            and not tensor.is_neg()
        )


def _unpack(saved: _Saved) -> Tensor:
    tensor, place = saved.tensor, saved.place
    # Autograd leaves out its own version check for tensors behind hooks.
    if saved.modified or (tensor is not None and tensor._version != saved.version):
        raise RuntimeError("a tensor needed for a gradient, to be offloaded, was modified in place after it was saved")
    if tensor is not None:
        return tensor
    home = saved.home
    assert home is not None and place is not None
    if home.bytes is None:
        raise RuntimeError(f"a tensor of shape {tuple(place.shape)} needed for a gradient is away on the host")
    view = torch.empty(0, dtype=place.dtype, device=home.bytes.device)
    return view.set_(home.bytes.untyped_storage(), place.offset, place.shape, place.stride)


def _storage_key(tensor: Tensor) -> int:
    """The identity of a tensor's storage while that lives."""
    key: int = tensor.untyped_storage()._cdata
    return key


def _holders(storage: torch.UntypedStorage) -> int:
    """How many tensors lie in ``storage``, whether Python or the graph has them; itself is one holder too."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count - 1


def _flat(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _rounded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
