"""A model of CUDA graphs on the CPU: records a capture, and replays it on the same memory without any Python.

:func:`install` puts it in the place of torch.cuda's graphs and of Transformer Engine's weak references. While a graph
is captured, every aten op is recorded with the memory that it reads and writes. A replay executes the same ops on the
same memory. So a stale input, a gradient that Python accumulates, a hook, or memory that another capture got in between
shows up as a wrong number, as on a GPU:

- Memory that an op allocates in a capture comes from the graph's pool. It goes back when the last tensor that owns it
  dies, be it one that autograd saved. A later capture with the same pool may get it. A replay does not ask.
- Weak references keep the address and own nothing.
- A capture writes nothing outside its pool: it records ``main_grad.add_(...)`` and does not do it.
- Reading a number on the host inside a capture is an error (``.item()``, sizes that depend on data).
- A graph owns nothing that it reads from outside. Memory that was freed since is an error here, nonsense on a GPU.
- Capturing twice with one CUDAGraph is an error, and so is replaying one that was never captured.

Messages and collectives run in a capture, because all ranks capture in one order, but on copies of what lies outside
the pool. A replay posts them again and waits for each where the capture did. One that the capture does not wait for is
an error: on a GPU its stream would not join. Asking for an event, and waiting for the host, are errors in a capture.

Each replay draws its random numbers from the default generator. Not modelled: streams, memory of kernels, tensors of
the host (all but those of torch.tensor count as the device's), and what reads memory without an op, such as
``.tolist()`` and ``.numpy()``.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

_HOST_READS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2", "item")
_UNINITIALISED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")
_ROUND = 512


class CaptureError(RuntimeError):
    """What a GPU would refuse, or do wrongly without a word."""


class _Block:
    """Memory of a pool: its address never changes, and one owner at a time."""

    def __init__(self, pool: Pool, size: int) -> None:
        self.pool, self.size, self.array = pool, size, np.zeros(size, dtype=np.uint8)
        self.address, self.owned = self.array.__array_interface__["data"][0], False

    def own(self) -> Tensor:
        """All of it as bytes; the block is free when no tensor has this storage any more."""
        view = self.array[:]
        self.owned = True
        self.pool.live += self.size
        self.pool.peak = max(self.pool.peak, self.pool.live)
        weakref.finalize(view, self._free).atexit = False
        return torch.from_numpy(view)

    def weak(self) -> Tensor:
        """All of it as bytes, without owning it."""
        return torch.from_numpy(self.array)

    def _free(self) -> None:
        self.owned = False
        self.pool.live -= self.size


class Pool:
    """Memory that graphs share. ``peak`` is what a GPU's allocator would have to have at once."""

    def __init__(self) -> None:
        self.blocks: dict[int, list[_Block]] = {}
        self.live = self.peak = 0

    def take(self, size: int) -> _Block:
        size = -(-size // _ROUND) * _ROUND
        same = self.blocks.setdefault(size, [])
        block = next((each for each in same if not each.owned), None)
        if block is None:
            block = _Block(self, size)
            same.append(block)
            _BLOCKS[block.address] = block
        return block


_BLOCKS: dict[int, _Block] = {}
# Tensors that torch.tensor has made for the host. They are kept, so that no other tensor gets their memory.
_HOST: dict[int, Tensor] = {}
_POOLS: dict[Any, Pool] = {}
_capturing: list[CUDAGraph] = []
COUNTS = {"captures": 0, "replays": 0, "ops": 0}


def graph_pool_handle() -> Any:
    handle = (len(_POOLS) + 1, 0)
    _POOLS[handle] = Pool()
    return handle


def pools() -> list[Pool]:
    return list(_POOLS.values())


def capturing() -> bool:
    return bool(_capturing)


def block_of(tensor: Tensor) -> _Block | None:
    return _BLOCKS.get(tensor.untyped_storage().data_ptr())


def weak(value: Any) -> Any:
    """Weak references of the tensors in ``value`` that lie in a pool, as Transformer Engine makes them."""

    def of(tensor: Any) -> Any:
        block = block_of(tensor) if type(tensor) is Tensor else None
        if block is None:
            return tensor
        made = _Memory(tensor).tensor()
        return made.requires_grad_(tensor.requires_grad)

    return tree_map(of, value)


class _Memory:
    """Where a tensor lies; not the tensor. A number that Python gave an op is ``kept``."""

    def __init__(self, tensor: Tensor, *, kept: bool = False) -> None:
        self.block = block_of(tensor)
        self.form = tuple(tensor.size()), tuple(tensor.stride()), tensor.storage_offset()
        self.dtype, self.weak, self.strong = tensor.dtype, None, None
        if self.block is None:
            if tensor.dim() == 0 and (kept or not tensor.is_leaf):
                self.strong = tensor.untyped_storage()
            self.weak = StorageWeakRef(tensor.untyped_storage())

    def tensor(self) -> Tensor:
        with torch.no_grad():
            if self.block is not None:
                return self.block.weak().view(self.dtype).as_strided(*self.form)
            if self.weak.expired():
                raise CaptureError(f"a graph reads or writes memory of shape {self.form[0]} that was freed since")
            storage = torch.UntypedStorage._new_with_weak_ptr(self.weak.cdata)
            return torch.empty(0, dtype=self.dtype).set_(storage, self.form[2], self.form[0], self.form[1])


def _memory_of(value: Any, *, kept: bool = False) -> Any:
    return tree_map(lambda each: _Memory(each, kept=kept) if isinstance(each, Tensor) else each, value)


def _tensors_of(value: Any) -> Any:
    return tree_map(lambda each: each.tensor() if isinstance(each, _Memory) else each, value)


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: CUDAGraph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind not in (Tensor, torch.nn.Parameter) and issubclass(kind, Tensor) for kind in types):
            return NotImplemented  # its own __torch_dispatch__ asks for plain ops
        name, space = func._schema.name.split("::")[1], func.namespace
        if space == "c10d":
            return self._collective(func, args, kwargs)
        if name in _HOST_READS and not _on_host(args):
            raise CaptureError(f"{name} reads from the device inside a capture")
        written = [
            value
            for argument, value in _bound(func._schema, args, kwargs)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if written:
            self.graph.record(func, args, kwargs, None)
            outside = [t for t in tree_flatten(written)[0] if isinstance(t, Tensor) and block_of(t) is None]
            if outside and name not in ("set_", "resize_", "detach_"):
                return _aliases(func._schema, args, kwargs)
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        inputs = {t.untyped_storage().data_ptr() for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)}
        outputs, form = tree_flatten(result)
        fresh = [isinstance(o, Tensor) and o.untyped_storage().data_ptr() not in inputs for o in outputs]
        if not any(fresh):
            return result  # a view
        moved = [self._moved(o) if new else o for o, new in zip(outputs, fresh, strict=True)]
        if name not in _UNINITIALISED:
            self.graph.record(func, args, kwargs, [m if new else None for m, new in zip(moved, fresh, strict=True)])
        return tree_unflatten(moved, form)

    def _moved(self, output: Tensor) -> Tensor:
        if output.numel() == 0:
            return output
        last = sum((n - 1) * s for n, s in zip(output.size(), output.stride(), strict=True))
        size = (last + 1) * output.element_size()
        block = self.graph.memory.take(size)
        whole = block.own()[: block.size // output.element_size() * output.element_size()].view(output.dtype)
        return whole.as_strided(output.size(), output.stride()).copy_(output)

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        slot = self.graph.record(func, args, kwargs, None)
        copies = {}

        def copied(value: Any) -> Any:
            if not isinstance(value, Tensor) or block_of(value) is not None:
                return value
            copy = value.detach().clone()
            copies[id(copy)] = value
            return copy

        def returned(value: Any) -> Any:
            if isinstance(value, torch.ScriptObject):
                return self.graph.awaits(slot, value, given)
            return copies.get(id(value), value)

        given = tree_map(copied, (args, kwargs))
        return tree_map(returned, func(*given[0], **given[1]))


def _on_host(args: Any) -> bool:
    tensors = [each for each in tree_flatten(args)[0] if isinstance(each, Tensor)]
    return all(each.untyped_storage().data_ptr() in _HOST for each in tensors)


def _bound(schema: Any, args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
    pairs = list(zip(schema.arguments, args, strict=False))
    return pairs + [(a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs]


def _aliases(schema: Any, args: Any, kwargs: Any) -> Any:
    """What an op returns that was not executed: the arguments it would have written."""
    named = {frozenset(a.alias_info.before_set): v for a, v in _bound(schema, args, kwargs) if a.alias_info is not None}
    found = [named[frozenset(each.alias_info.before_set)] for each in schema.returns]
    return found[0] if len(found) == 1 else tuple(found) if found else None


class _Awaited(Work):
    """A message that a capture has posted: waiting for it is recorded. ``memory`` is what it reads and writes."""

    def __init__(self, graph: CUDAGraph, slot: int, posted: Any, memory: Any) -> None:
        super().__init__()
        self._graph, self._slot, self._posted, self._memory = graph, slot, posted, memory

    def wait(self, timeout: Any = None) -> bool:
        if not self._graph.is_open:
            raise CaptureError("what a capture has sent is waited for outside of it")
        self._graph.waits(self._slot)
        with _disable_current_modes():
            Work.unbox(self._posted).wait()
        self._memory = None
        return True


class CUDAGraph:
    """Stands for torch.cuda.CUDAGraph."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._ops: list[tuple[Any, Any, Any, Any]] | None = None
        self._handle: Any = None
        self._recorder: _Recorder | None = None
        self._posted: dict[int, _Awaited] = {}
        self._unawaited: set[int] = set()
        # Not of the class, where Transformer Engine looks for random states of graphs, which a CPU does not have.
        self.register_generator_state: Callable[[Any], None] = lambda state: None

    @property
    def is_open(self) -> bool:
        return self._recorder is not None

    @property
    def memory(self) -> Pool:
        return _POOLS[self._handle]

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        if self._ops is not None:
            raise CaptureError("this CUDAGraph has been captured before")
        if _capturing:
            raise CaptureError("a capture inside a capture")
        self._ops, self._handle = [], pool if pool is not None else graph_pool_handle()
        _capturing.append(self)
        COUNTS["captures"] += 1
        self._recorder = _Recorder(self)
        self._recorder.__enter__()

    def capture_end(self) -> None:
        self._recorder.__exit__(None, None, None)
        self._recorder = None
        _capturing.pop()
        self._posted.clear()
        if self._unawaited:
            raise CaptureError(f"{len(self._unawaited)} messages of a capture do not join it: nothing waits for them")

    def record(self, func: Any, args: Any, kwargs: Any, outputs: Any) -> int:
        # Memory is noted before the op: an output that dies at once still has its address.
        kept = "index_put" in str(func)  # x[mask] = 0 makes a tensor of the number
        self._ops.append((func, _memory_of(args, kept=kept), _memory_of(kwargs), _memory_of(outputs)))
        return len(self._ops) - 1

    def awaits(self, slot: int, posted: Any, memory: Any) -> Any:
        """What stands for the message that the op number ``slot`` has posted."""
        self._posted[slot] = _Awaited(self, slot, posted, memory)
        self._unawaited.add(slot)
        return self._posted[slot].boxed()

    def waits(self, slot: int) -> None:
        """The capture waits here for the message of the op number ``slot``."""
        if slot in self._unawaited:
            self._ops.append((None, slot, None, None))
        self._unawaited.discard(slot)

    def replay(self) -> None:
        if self._ops is None:
            raise CaptureError("replay of a graph that was never captured")
        if _capturing:
            raise CaptureError("a replay inside a capture")
        COUNTS["replays"] += 1
        COUNTS["ops"] += len(self._ops)
        with torch.no_grad():
            posted: dict[int, Any] = {}
            for slot, (func, args, kwargs, outputs) in enumerate(self._ops):
                if func is None:
                    posted.pop(args)[0].wait()
                    continue
                given = _tensors_of(args), _tensors_of(kwargs)
                result = func(*given[0], **given[1])
                if func.namespace == "c10d":
                    work = next(
                        (each for each in tree_flatten(result)[0] if isinstance(each, torch.ScriptObject)), None
                    )
                    if work is not None:
                        posted[slot] = Work.unbox(work), given
                elif outputs is not None:
                    for to, value in zip(outputs, tree_flatten(result)[0], strict=True):
                        if to is not None and value.numel():
                            to.tensor().copy_(value)

    def reset(self) -> None:
        self._ops = None

    def pool(self) -> Any:
        return self._handle

    def __len__(self) -> int:
        return len(self._ops or ())


class graph:  # noqa: N801
    """Stands for torch.cuda.graph."""

    def __init__(
        self, cuda_graph: CUDAGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = ""
    ) -> None:
        self.graph, self.handle = cuda_graph, pool

    def __enter__(self) -> None:
        self.graph.capture_begin(pool=self.handle)

    def __exit__(self, *raised: Any) -> None:
        self.graph.capture_end()


def _not_captured(name: str, function: Any) -> Any:
    """``function``, which asks the device or waits for it, so that it cannot be called in a capture."""

    def called(*args: Any, **kwargs: Any) -> Any:
        if _capturing:
            raise CaptureError(f"{name} in a capture")
        return function(*args, **kwargs)

    return called


def _unrecorded(function: Any) -> Any:
    def called(*args: Any, **kwargs: Any) -> Any:
        if not _capturing:
            return function(*args, **kwargs)
        with _disable_current_modes():
            return function(*args, **kwargs)

    return called


def _made_on_host(make: Any) -> Any:
    def made(*args: Any, **kwargs: Any) -> Tensor:
        tensor: Tensor = make(*args, **kwargs)
        if _capturing and "cuda" not in str(kwargs.get("device", "")):
            _HOST[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    return made


def _unless_in_pool(resize: Any) -> Any:
    """Memory of a pool stays where it is, also where Megatron discards what it will recompute."""
    return lambda storage, size: storage if storage.data_ptr() in _BLOCKS else resize(storage, size)


def install() -> None:
    """Put the model in torch.cuda, after the CPU stand-in is on, and in Transformer Engine if it is imported."""
    torch.cuda.CUDAGraph, torch.cuda.graph = CUDAGraph, graph  # type: ignore[misc, assignment]
    torch.cuda.graph_pool_handle = graph_pool_handle  # type: ignore[assignment]
    torch.cuda.is_current_stream_capturing = capturing
    torch.tensor = _made_on_host(torch.tensor)
    torch.UntypedStorage.resize_ = _unless_in_pool(torch.UntypedStorage.resize_)  # type: ignore[method-assign]
    Work.wait = _unrecorded(Work.wait)  # type: ignore[method-assign]  # gloo copies its result there, with ops of its own
    torch.cuda.synchronize = _not_captured("synchronize", torch.cuda.synchronize)
    for method in ("query", "synchronize", "elapsed_time"):
        wrapped = _not_captured(f"Event.{method}", getattr(torch.cuda.Event, method))
        setattr(torch.cuda.Event, method, wrapped)
    engine = sys.modules.get("transformer_engine.pytorch.graph")
    if engine is not None:
        engine._graph_pool_handle = graph_pool_handle
        engine.make_weak_ref = weak
        attention = sys.modules.get("transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention")
        if hasattr(attention, "graph_safe_rng_available"):
            attention.graph_safe_rng_available = lambda: True
