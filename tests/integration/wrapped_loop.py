"""Loops on megatron-core whose model is wrapped in something else than Megatron's own data parallelism."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, suppress
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import megatron.schedules
from megatron.schedules.integration.model_checks import refuse_unfit
from megatron.schedules.job.values import ScheduleChoice
from tests.integration.core_loop import model_of, trained
from tests.integration.in_groups import in_groups
from tests.integration.results import Call, Done
from tests.loops.ours import install

Chunks = list[Any]


class Ended(NamedTuple):
    """How a loop ended on a rank: its status, what it said on standard error, and its results if it went on."""

    status: int
    said: str
    done: list[Done]


class Engine(torch.nn.Module):
    """As engines of other libraries: around the model, with a process group, and it knows when not to reduce."""

    def __init__(self, module: torch.nn.Module, group: Any = None) -> None:
        super().__init__()
        self.module = module
        self.groups = {"data": group}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class SwitchedEngine(Engine):
    """One that a loop tells when not to reduce."""

    def no_sync(self) -> None:
        """Says so."""


class Outside:
    """A wrapper that is no module and hands on whatever it is asked for."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self.group = module, _group()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


class Users(torch.nn.Module):
    """A user's own module around the model, with a hook, which reduces nothing."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module, self.seen = module, 0
        self.register_full_backward_hook(self._see)

    def _see(self, *_: Any) -> None:
        self.seen += 1

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class Part(torch.nn.Module):
    """A user's part of a layer, which knows its data-parallel group and does not reduce in it."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.group = inner, _group()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def _group() -> Any:
    return parallel_state.get_data_parallel_group()


def _each(wrap: Callable[[Any], Any]) -> Callable[[Chunks], Chunks]:
    return lambda chunks: [wrap(chunk) for chunk in chunks]


def _layers(chunks: Chunks) -> list[Any]:
    return [layer for chunk in chunks for layer in chunk.decoder.layers]


def _mlps(wrap: Callable[[Any], Any]) -> Callable[[Chunks], Chunks]:
    def wrapped(chunks: Chunks) -> Chunks:
        for layer in _layers(chunks):
            layer.mlp = wrap(layer.mlp)
        return chunks

    return wrapped


def _sharded(chunks: Chunks) -> Chunks:
    for module in (*_layers(chunks), *chunks):
        fully_shard(module, mesh=DeviceMesh.from_group(_group(), "cpu"))
    return chunks


def _sharded_on_the_first_rank(chunks: Chunks) -> Chunks:
    return _sharded(chunks) if parallel_state.is_pipeline_first_stage(ignore_virtual=True) else chunks


def _overlapped(chunks: Chunks) -> Chunks:
    """A user's module around Megatron's data parallelism, which reduces behind the backward."""
    config = chunks[0].config
    how = DistributedDataParallelConfig(overlap_grad_reduce=True)
    wrapped = [Users(DistributedDataParallel(config, how, chunk)) for chunk in chunks]
    functions = [chunk.module.no_sync for chunk in wrapped]
    config.no_sync_func = functions if len(functions) > 1 else functions[0]
    config.finalize_model_grads_func = lambda *_, **__: [chunk.module.finish_grad_sync() for chunk in wrapped]
    return list(wrapped)


def _told_not_to_reduce(chunks: Chunks) -> Chunks:
    wrapped = WRAPPERS["torch's DistributedDataParallel"](chunks)
    functions = [chunk.no_sync for chunk in wrapped]
    chunks[0].config.no_sync_func = functions if len(functions) > 1 else functions[0]
    return wrapped


WRAPPERS: dict[str, Callable[[Chunks], Chunks]] = {
    "fully_shard": _sharded,
    "fully_shard on one rank": _sharded_on_the_first_rank,
    "fully_shard of a part": _mlps(lambda mlp: fully_shard(mlp, mesh=DeviceMesh.from_group(_group(), "cpu"))),
    "torch's DistributedDataParallel": _each(lambda m: TorchDistributedDataParallel(m, process_group=_group())),
    "torch's DistributedDataParallel of a part": _mlps(
        lambda mlp: TorchDistributedDataParallel(mlp, process_group=_group())
    ),
    "torch's DistributedDataParallel and no_sync_func": _told_not_to_reduce,
    "torch's FullyShardedDataParallel": _each(
        lambda m: FullyShardedDataParallel(
            m, process_group=_group(), use_orig_params=True, device_id=torch.device("cpu")
        )
    ),
    "replicate": _each(lambda m: replicate(m, process_group=_group())),
    "an engine": _each(lambda m: Engine(m, _group())),
    "an engine with no_sync": _each(SwitchedEngine),
    "no module": _each(Outside),
    "nothing": lambda chunks: chunks,
    "checkpoint_wrapper": _mlps(checkpoint_wrapper),
    "a user's part": _mlps(Part),
    "a user's module": _each(Users),
    "a user's module around Megatron's": _overlapped,
}


def wrapped_loops(
    cases: Sequence[tuple[str, str | None]], calls: Sequence[Call], *, late: bool = False, **options: Any
) -> list[list[Ended]]:
    """How the loop ends on each of two pipeline ranks, for each of ``cases`` in turn.

    Args:
        cases: a name of :data:`WRAPPERS`, and the schedule; None for none.
        calls: of the schedule function.
        late: whether ``install`` is called only when the model is built.
        options: of the model.
    """
    chunks = options.pop("chunks", 1)
    sizes = {"pipeline_model_parallel_size": 2} | (
        {"virtual_pipeline_model_parallel_size": chunks} if chunks > 1 else {}
    )
    return in_groups(2, _wrapped_loops, cases, calls, late, options, **sizes)


def passing(cases: Sequence[tuple[str, str]]) -> list[bool]:
    """For each of ``cases``, a wrapper and a schedule, whether the checks let a model of one chunk train."""
    return in_groups(1, _passing, cases)[0]


def _passing(cases: Sequence[tuple[str, str]]) -> list[bool]:
    ended = []
    for wrapper, schedule in cases:
        with redirect_stderr(io.StringIO()), suppress(SystemExit):
            refuse_unfit(WRAPPERS[wrapper](model_of(wrapped=False)), ScheduleChoice(schedule, schedule))
            ended.append((wrapper, schedule))
    return [case in ended for case in cases]


def _wrapped_loops(cases: Any, calls: Any, late: bool, options: dict[str, Any]) -> list[Ended]:
    torch.set_num_threads(1)
    return [_wrapped_loop(WRAPPERS[wrapper], schedule, calls, late, options) for wrapper, schedule in cases]


def _wrapped_loop(
    wrap: Callable[[Chunks], Chunks], schedule: str | None, calls: Any, late: bool, options: dict[str, Any]
) -> Ended:
    said = io.StringIO()
    with redirect_stderr(said):
        try:
            passes = install(None if late else schedule)
            chunks = model_of(wrapped=False, **options)
            if late:
                megatron.schedules.install(schedule=schedule)
            done = trained(wrap(chunks), calls, passes, **options)
        except SystemExit as leaving:
            return Ended(int(leaving.code or 0), said.getvalue(), [])
    return Ended(0, said.getvalue(), done)
