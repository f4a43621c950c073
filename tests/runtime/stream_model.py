"""A device in the mind: streams, events and the caching allocator, for code that runs on the CPU.

Inside :class:`StreamModel` each operation of torch's is carried out at once, and noted as if the host had queued it on
the current stream of a device that is behind. What each operation must wait for is known (a vector clock for each
stream), so *every* order in which the device may do its work is judged at once:

- a read must come after the last write, a write after that and all reads since;
- memory that is freed belongs to its stream's pool at once. Whatever is allocated on this stream next may get it, so
  all that was queued for it must come before;
- memory with ``record_stream`` gets there only when the host, at an allocation, sees those streams where they were
  when it was freed. Only here does it matter how far the device is: see ``pace``.

Tensors live on the CPU and stand for the device's. Memory that no operation inside made (parameters, pinned memory) is
watched, and not counted.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

# They change what a tensor refers to, not the memory.
_NO_KERNEL = {
    "aten::set_",
    "aten::empty",
    "aten::empty_strided",
    "aten::empty_like",
    "aten::new_empty",
    "aten::resize_",
}


class FaultError(AssertionError):
    """Something that goes wrong in an order in which the device may do its work."""


class Point(NamedTuple):
    """The operation ``number`` of a stream, from 1 on."""

    stream: Stream
    number: int


class Stream:
    """A queue of operations.

    Attributes:
        name: for messages.
        before: of each stream, the last operation that is done before what is queued here next.
        done: how many operations the device has done.
    """

    def __init__(self, model: StreamModel, name: str) -> None:
        self.name, self._model = name, model
        self.before: dict[Stream, int] = {self: 0}
        self.done = 0
        self._needs: list[dict[Stream, int]] = []

    def queue(self) -> Point:
        """One operation more."""
        self._needs.append(dict(self.before))
        self.before[self] += 1
        self._model.go_on()
        return Point(self, self.before[self])

    def step(self) -> None:
        """The device does the next operation, if it can."""
        if self.done < len(self._needs) and _reached(self._needs[self.done]):
            self.done += 1

    def follows(self, point: Point) -> bool:
        """Whether what is queued next comes after ``point``."""
        return self.before.get(point.stream, 0) >= point.number

    def record_event(self) -> Event:
        return Event(dict(self.before))

    def wait_event(self, event: Event) -> None:
        for stream, number in event.after.items():
            self.before[stream] = max(self.before.get(stream, 0), number)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class Event(NamedTuple):
    """What must be done for it to come."""

    after: dict[Stream, int]


def _reached(after: dict[Stream, int]) -> bool:
    return all(stream.done >= number for stream, number in after.items())


@dataclass
class _Memory:
    """What is known of a storage.

    Args:
        pool: the stream that it was allocated for; None for memory from outside.
        size: in bytes; 0 for memory from outside.
        storage: which one the allocator knows.
        written: the last write, or the end of what was queued before it was allocated.
        read: by stream, the last read since.
        recorded: streams given to ``record_stream``.
    """

    pool: Stream | None
    size: int
    storage: int
    written: Point | None = None
    read: dict[Stream, int] = field(default_factory=dict)
    recorded: set[Stream] = field(default_factory=set)

    def uses(self) -> Iterator[Point]:
        if self.written is not None:
            yield self.written
        yield from map(Point._make, self.read.items())


class StreamModel(TorchDispatchMode):
    """One device, in place of ``torch.cuda``.

    Args:
        pace: how likely it is that the device does something more before the host goes on: with 0 the host runs ahead
            of all, with 1 the device has always done what it can.
        seed: of chance.

    Attributes:
        held: bytes that the allocator cannot hand out.
        peak: the most of them.
    """

    def __init__(self, pace: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        self._pace, self._random = pace, random.Random(seed)
        self._streams: list[Stream] = []
        self._main = self._current = self.Stream(None)
        self._memory: dict[int, _Memory] = {}
        self._freed: dict[Stream, list[_Memory]] = {}
        self._recorded: list[tuple[dict[Stream, int], _Memory]] = []
        self.held = self.peak = 0

    # --- torch.cuda ---

    def Stream(self, device: Any, priority: int = 0) -> Stream:  # noqa: N802 - the name in torch
        self._streams.append(Stream(self, f"stream {len(self._streams)}"))
        return self._streams[-1]

    def current_stream(self, device: Any = None) -> Stream:
        return self._current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def cudart(self) -> Any:
        return SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)

    # --- the device ---

    def go_on(self) -> None:
        """The device does something, or nothing."""
        if self._pace == 1:
            before = -1
            while before != (before := sum(stream.done for stream in self._streams)):
                for stream in self._streams:
                    stream.step()
        while self._random.random() < self._pace < 1:
            self._random.choice(self._streams).step()

    # --- memory ---

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        known, name = {_address(tensor) for tensor in given} | self._memory.keys(), func._schema.name
        fresh = [tensor for tensor in made if _address(tensor) not in known] if name != "aten::set_" else []
        for tensor in fresh:
            self._allocate(tensor)
        if not func.is_view and name not in _NO_KERNEL:
            arguments = {argument.name: argument for argument in func._schema.arguments}
            named = dict(zip(arguments, args, strict=False)) | kwargs
            into = [value for key, value in named.items() if _is_written(arguments[key])]
            changed = [each for each in tree_leaves(into) if isinstance(each, Tensor)]
            self.run(self._current, reads=given, writes=[*changed, *fresh], what=name)
        return result

    def run(self, stream: Stream, reads: Sequence[Tensor], writes: Sequence[Tensor], what: str) -> None:
        """Queues an operation on ``stream``."""
        written = {id(memory): memory for memory in map(self._of, writes) if memory is not None}
        read = {id(memory): memory for memory in map(self._of, reads) if memory is not None}
        for memory in (read | written).values():
            before = memory.uses() if id(memory) in written else [memory.written] if memory.written else []
            for use in before:
                if not stream.follows(use):
                    raise FaultError(
                        f"{what} on {stream.name} does not wait for operation {use.number} of {use.stream.name}"
                    )
        point = stream.queue()
        for key, memory in (read | written).items():
            if key in written:
                memory.written, memory.read = point, {}
            else:
                memory.read[stream] = point.number

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """As ``Tensor.record_stream``: does nothing where the allocator does not know the storage."""
        memory = self._of(tensor)
        if memory is not None and memory.storage == tensor.untyped_storage()._cdata:
            memory.recorded.add(stream)

    def _of(self, tensor: Tensor) -> _Memory | None:
        address = _address(tensor)
        if address == 0:
            return None
        if address not in self._memory:
            self._watch(tensor, _Memory(None, 0, 0))
        return self._memory[address]

    def _allocate(self, tensor: Tensor) -> None:
        stream, storage = self._current, tensor.untyped_storage()
        if _address(tensor) == 0:
            return
        for after, memory in [each for each in self._recorded if _reached(each[0])]:
            self._recorded.remove((after, memory))
            self._return(memory)
        for memory in self._freed.pop(stream, []):
            for use in memory.uses():
                if not stream.follows(use):
                    raise FaultError(
                        f"memory was freed to {stream.name} before operation {use.number} of {use.stream.name}"
                    )
        start = Point(stream, stream.before[stream])
        self._watch(tensor, _Memory(stream, storage.nbytes(), storage._cdata, start))
        self.held += storage.nbytes()
        self.peak = max(self.peak, self.held)

    def _watch(self, tensor: Tensor, memory: _Memory) -> None:
        self._memory[_address(tensor)] = memory
        weakref.finalize(tensor.untyped_storage(), self._free, _address(tensor)).atexit = False

    def _free(self, address: int) -> None:
        memory = self._memory.pop(address)
        if memory.recorded:
            self._recorded.append(({stream: stream.before[stream] for stream in memory.recorded}, memory))
        else:
            self._return(memory)

    def _return(self, memory: _Memory) -> None:
        if memory.pool is not None:
            memory.read = {stream: number for stream, number in memory.read.items() if stream not in memory.recorded}
            if memory.written is not None and memory.written.stream in memory.recorded:
                memory.written = None
            self._freed.setdefault(memory.pool, []).append(memory)
            self.held -= memory.size


class Group:
    """A process group of NCCL's: a stream that uses what it is given.

    As torch does it from 2.8 on: memory of a send or a receive is recorded (2.7 records that of collectives too), and
    what a collective uses is held until it is waited for.

    Args:
        model: the device.
        value: what is received.
    """

    def __init__(self, model: StreamModel, value: float = 0.5) -> None:
        self._model, self._value, self._stream = model, value, model.Stream(None)

    def send(self, tensors: list[Tensor], other: int = 0, tag: int = 0) -> Work:
        return self._message(tensors, (), "a send")

    def recv(self, tensors: list[Tensor], other: int = 0, tag: int = 0) -> Work:
        with _disable_current_modes():
            tensors[0].fill_(self._value)
        return self._message((), tensors, "a receive")

    def collective(self, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Work:
        return self._post(reads, writes, "a collective", [*reads, *writes])

    def _message(self, reads: Sequence[Tensor], writes: Sequence[Tensor], what: str) -> Work:
        posted = self._post(reads, writes, what, [])
        for tensor in (*reads, *writes):
            self._model.record_stream(tensor, self._stream)
        return posted

    def _post(self, reads: Sequence[Tensor], writes: Sequence[Tensor], what: str, held: list[Tensor]) -> Work:
        self._stream.wait_stream(self._model.current_stream())
        self._model.run(self._stream, reads, writes, what)
        return Work(self._model, self._stream.record_event(), held)


class Work(NamedTuple):
    """A posted message or collective."""

    model: StreamModel
    event: Event
    held: list[Tensor]

    def wait(self) -> None:
        self.model.current_stream().wait_event(self.event)
        self.held.clear()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write
