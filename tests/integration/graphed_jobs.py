"""Jobs whose layers, or whole iterations, are CUDA graphs, by the model of CUDA graphs on the CPU."""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core import full_cuda_graph
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe.paged_stash import PagedStashRunner
from megatron.training import training

import pretrain_gpt
from megatron.schedules.integration.graphs import capture, replay
from megatron.schedules.integration.layers.losses import ResultRelay
from megatron.schedules.integration.schedule_function import ScheduleFunction
from megatron.schedules.runtime import transport
from megatron.schedules.runtime.collectives import Chain, CollectiveRunner, Pending
from megatron.schedules.runtime.position import PositionTracker
from megatron.schedules.runtime.weight_gradients import WeightGradients
from megatron.schedules.schedule.graph_slots import GraphSlot, graph_slots
from megatron.schedules.schedule.kinds import Kind, Pass
from tests.integration import fake_deep_ep, fused_kernels, low_rank
from tests.integration.core_loop import core_loop
from tests.integration.forked_ranks import run_ranks
from tests.integration.results import Call, Graphed
from tests.integration.server import ROUNDING_VARIABLE
from tests.integration.sync_detector import detected
from tests.support import cuda_graphs, paged_stash, te_grouped, te_nvfp4
from tests.support.weights import named_parameters


def graphed(world: int, flags: Sequence[str], fault: str = "", adapters: bool = False) -> list[Graphed]:
    """Run ``pretrain_gpt.py`` with ``flags`` on ``world`` ranks, with one of :data:`FAULTS` in it.

    With ``adapters`` only low-rank ones beside every linear are trained.
    """
    return run_ranks(world, _rank, list(flags), fault, adapters)


def graphed_loop(sizes: dict[str, int], settings: dict[str, Any], calls: Sequence[Call], **options: Any) -> Any:
    """:func:`.core_loop` with the model of CUDA graphs on each rank."""
    return core_loop(sizes, settings, calls, prepare=_graphs_on_cpu, **options)


def _graphs_on_cpu() -> None:
    cuda_graphs.install()
    _share_by_copying()
    transport.collectives_on = lambda device: _AtOnce()


class _AtOnce(CollectiveRunner):
    """Runs chains in the thread that posts them, which a capture records. On a GPU a side stream runs them."""

    def post(self, chain: Chain) -> Pending:
        with torch.no_grad():
            return _Ended(chain())

    def finish(self) -> None: ...


class _Ended(NamedTuple):
    result: torch.Tensor | None

    def wait(self) -> torch.Tensor:
        assert self.result is not None
        return self.result.detach()


def _rank(flags: list[str], fault: str, adapters: bool) -> Graphed:
    torch.set_num_threads(1)
    fused_kernels.forget()
    if os.environ.get(ROUNDING_VARIABLE) == "1":
        te_nvfp4.round_to_nearest()
    _graphs_on_cpu()
    if adapters:
        low_rank.put_in_place()
    if fault:
        FAULTS[fault]()
    if "flex" in flags:
        fake_deep_ep.put_in()
        if "--use-transformer-engine-op-fuser" in flags:
            te_grouped.install()
            paged_stash.install()
    seen = Graphed([], [], 0, [], [], [])
    _look_for_waits(seen.waits)
    log, step, evaluate = training.training_log, training.train_step, training.evaluate
    takes = inspect.signature(step)

    def training_log(losses: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        if "lm loss" in losses:
            seen.losses.append(float(losses["lm loss"]))
        return log(losses, *args, **kwargs)

    def recorded(schedule: Callable[..., Any]) -> Callable[..., Any]:
        def call(*, model: Any, forward_only: bool = False, **rest: Any) -> Any:
            before = cuda_graphs.COUNTS["replays"]
            result = schedule(model=model, forward_only=forward_only, **rest)
            if not forward_only:
                named: list[Any] = [(n, p) for n, p in named_parameters(model) if hasattr(p, "main_grad")]
                seen.gradients.append({name: _digest(parameter.main_grad) for name, parameter in named})
                seen.replays.append(cuda_graphs.COUNTS["replays"] - before)
            return result

        return call

    def train_step(*args: Any, **kwargs: Any) -> Any:
        bound = takes.bind(*args, **kwargs)  # whatever wraps the schedule
        bound.arguments["forward_backward_func"] = recorded(bound.arguments["forward_backward_func"])
        return step(*bound.args, **bound.kwargs)

    def evaluated(*args: Any, **kwargs: Any) -> Any:
        losses, *rest = evaluate(*args, **kwargs)
        seen.evaluations.extend(float(value) for value in losses.values())
        return losses, *rest

    training.training_log, training.train_step, training.evaluate = training_log, train_step, evaluated
    sys.argv = ["pretrain_gpt.py", *flags]
    pretrain_gpt.main()
    return seen._replace(captures=cuda_graphs.COUNTS["captures"])


def _look_for_waits(found: list[str]) -> None:
    call = ScheduleFunction.__call__

    def watched(self: ScheduleFunction, **arguments: Any) -> Any:
        if not cuda_graphs.capturing():
            return call(self, **arguments)
        with detected() as detector:
            result = call(self, **arguments)
        found.extend(wait for wait in detector.found if "/tests/support/" not in wait)  # what stands for kernels
        return result

    ScheduleFunction.__call__ = watched  # type: ignore[method-assign]


def _share_by_copying() -> None:
    """Megatron gives discarded outputs the memory of recomputed ones; that of the model's pool stays where it is."""
    compiled = random._get_share_storage  # which takes half a minute on a new machine

    def share(output: torch.Tensor, recomputed: torch.Tensor) -> None:
        if cuda_graphs.block_of(output) is None:
            compiled()(output, recomputed)
        else:
            output.data.copy_(recomputed)

    random._get_share_storage = lambda: share


def _digest(gradient: torch.Tensor) -> str:
    assert gradient.dtype is torch.float32
    return hashlib.sha256(gradient.numpy().tobytes()).hexdigest()


def _no_copy_in() -> None:
    WeightGradients.kept = lambda self, operand: operand  # type: ignore[method-assign]


def _outputs_in_place() -> None:
    replay.memory_of = lambda values: ()  # type: ignore[assignment]


def _stale() -> None:
    kept = WeightGradients.kept
    WeightGradients.kept = lambda self, operand: cuda_graphs.weak(kept(self, operand))  # type: ignore[method-assign]


def _one_slot() -> None:
    """All microbatches of a stage replay the graphs of its first with the same passes."""

    def slots(row: Sequence[Pass]) -> dict[tuple[int, int], GraphSlot]:
        split, first = {work[::2] for work in row if work.kind is Kind.W}, dict[Any, GraphSlot]()
        return {key: first.setdefault((key[0], key in split), slot) for key, slot in graph_slots(row).items()}

    capture.graph_slots = slots


def _slots_end_early() -> None:
    """One pass too early, where backwards are whole: behind F."""

    def slots(row: Sequence[Pass]) -> dict[tuple[int, int], GraphSlot]:
        forwards = [work for work in row if work.kind is Kind.F]
        return graph_slots([each for work in forwards for each in (work, work._replace(kind=Kind.B))])

    capture.graph_slots = slots


def _relay_asks() -> None:
    call = ResultRelay.__call__
    ResultRelay.__call__ = lambda self, results, device, alike: call(self, results, device)  # type: ignore[method-assign]


def _events_asked() -> None:
    running = PositionTracker.running
    PositionTracker.running = lambda self, marked: running(self)  # type: ignore[method-assign, assignment]


def _sends_not_awaited() -> None:
    transport.Transport.finish = lambda self: None  # type: ignore[method-assign]


def _first_samples() -> None:
    full_cuda_graph.clone_tensors_in_struct = lambda to, samples: None


def _wrong_pages() -> None:
    pop = paged_stash.pop
    paged_stash.pop = lambda *args, **sizes: pop(*args[:4], args[4].roll(1), *args[5:], **sizes)


def _runs_once() -> None:
    PagedStashRunner.check_moe_overflow = lambda self: (0, 0, 0)


FAULTS: Mapping[str, Callable[[], None]] = {
    "outputs in place": _outputs_in_place,
    "no copy in": _no_copy_in,
    "stale": _stale,
    "slots end early": _slots_end_early,
    "one slot": _one_slot,
    "relay asks": _relay_asks,
    "events asked": _events_asked,
    "sends not awaited": _sends_not_awaited,
    "first samples": _first_samples,
    "wrong pages": _wrong_pages,
    "runs once": _runs_once,
}
