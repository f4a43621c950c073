"""Verification of a job: its first training call as planned, and again with whole backwards on the same samples."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megatron.schedules.integration.call_state import Chunks, Replayed, captured, gradient_of, replayed
from megatron.schedules.integration.cpu import standin
from megatron.schedules.integration.log.rank_lines import print_rank_0
from megatron.schedules.integration.model_binding import ModelBinding
from megatron.schedules.integration.rank_device import PeakReport
from megatron.schedules.programs.program import Program
from megatron.schedules.report.verification import Difference, RankResult, lines, passed
from megatron.schedules.runtime.control_messages import of_all_ranks
from megatron.schedules.runtime.planner import Planner
from megatron.schedules.schedule.simulator import Timeline

_LOSS = "what the loss function returned"

Run = Callable[[Program, Sequence[Any], bool], list[Any]]
"""Runs one call: program, data iterators, and whether it is the same call again. Returns what the loss function did."""


class _Outcome(NamedTuple):
    """One run of the call. Gradients stay in the parameters until the next run.

    Args:
        results: numbers that the loss function returned.
        fired: how often each parameter's hooks fired.
        seconds: duration.
    """

    results: Tensor
    fired: Counter[str]
    seconds: float


class Verification:
    """Runs one training call several times, compares the runs, prints a table, and ends the process.

    All ranks end with status 0 if gradients, hooks and loss are those of the reference on all ranks, else with 1.
    Gradients are compared after their reduction over data-parallel ranks. Those of the first run are copied to the
    host, and those of the reference where they differ.

    Args:
        planner: plans references.
        peaks: measures peak memory.
        model: has the parameters whose gradients come in parts.
    """

    def __init__(self, planner: Planner, peaks: PeakReport, model: ModelBinding) -> None:
        self._planner, self._peaks, self._model = planner, peaks, model

    def __call__(
        self, run: Run, chunks: Chunks, iterators: Sequence[Any], program: Program, timeline: Timeline
    ) -> NoReturn:
        """Verifies ``program``, this rank's of the plan ``timeline``. Collective over all ranks of the job."""
        references = self._planner.references(timeline, program.rank)
        restore, samples = captured(chunks), replayed(iterators)
        parameters = dict(_named_parameters(chunks, program))

        def again(which: Program) -> _Outcome:
            restore()
            for iterator in samples:
                if isinstance(iterator, Replayed):
                    iterator.rewind()
            return _outcome(partial(run, which, samples, True), parameters)

        if not standin.enabled():
            self._peaks.measure_next_call()
        planned = _outcome(partial(run, program, samples, False), parameters)
        in_parts = [name for name, parameter in parameters.items() if id(parameter) in self._model.partial_gradients]
        expected = {name: _on_host(value) for name, value in _values(parameters, planned)}
        reference = again(references[0])
        sizes, other = _compared(expected, _values(parameters, reference))
        for which in references[1:]:  # each gradient is summed in the order of one of them
            reference = again(which)
            less, other = _compared(expected, _values(parameters, reference))
            sizes = {name: min(size, less[name]) for name, size in sizes.items() if name in less}
        noise: dict[str, float] = {}
        if any(of_all_ranks(bool(sizes))):
            repeated = _values(parameters, again(references[-1]))
            noise, _ = _compared(other, ((name, value) for name, value in repeated if name in other))
        if standin.enabled():  # counting tensors changes how linears hold them, so it has a run of its own
            self._peaks.count_next_call()
            again(program)
        expected.pop(_LOSS)
        differences = {name: Difference(name, size, noise.get(name, 0.0)) for name, size in sizes.items()}
        mine = RankResult(
            dist.get_rank(),
            len(expected.keys() | sizes.keys() - {_LOSS}),
            sum(name not in sizes and not bool(value.isfinite().all()) for name, value in expected.items()),
            planned.results.numel(),
            [difference for name, difference in differences.items() if name != _LOSS],
            differences.get(_LOSS),
            [(n, times, reference.fired[n]) for n, times in planned.fired.items() if times > reference.fired[n]],
            self._peaks.bytes,
            (planned.seconds, reference.seconds),
            in_parts,
        )
        self._end(mine, timeline)

    def _end(self, mine: RankResult, timeline: Timeline) -> NoReturn:
        ranks, schedule = of_all_ranks(mine), timeline.schedule
        table = lines(ranks, schedule.name, self._planner.peak_bytes(timeline), splits=schedule.splits)
        print_rank_0("\n".join(f"pipeline schedule: verify: {line}" for line in table))
        dist.barrier()  # a launcher ends all ranks when the first has ended with 1
        sys.exit(int(not passed(ranks)))


def _outcome(run: Callable[[], list[Any]], parameters: dict[str, torch.nn.Parameter]) -> _Outcome:
    with _hooks_counted(parameters) as fired:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        results = run()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
    return _Outcome(_numbers(results), fired, seconds)


def _values(parameters: dict[str, torch.nn.Parameter], outcome: _Outcome) -> Iterator[tuple[str, Tensor]]:
    """Yields what is compared, by name: gradients as they are now, and the loss."""
    for name, parameter in parameters.items():
        gradient = gradient_of(parameter)
        if gradient is not None:
            yield name, gradient.detach()
    yield _LOSS, outcome.results


def _on_host(value: Tensor) -> Tensor:
    return value.to("cpu", copy=True)


@contextmanager
def _hooks_counted(parameters: dict[str, torch.nn.Parameter]) -> Iterator[Counter[str]]:
    """Counts how often each parameter's gradient is accumulated, which is when its hooks fire."""
    fired: Counter[str] = Counter()

    def count(name: str, *_: Any) -> None:
        fired[name] += 1

    # A hook on the node, not on the parameter: nobody else finds it. The node lives as long as it is referred to.
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    nodes = {name: torch.autograd.graph.get_gradient_edge(parameter).node for name, parameter in trained.items()}
    handles = [node.register_hook(partial(count, name)) for name, node in nodes.items()]
    try:
        yield fired
    finally:
        for handle in handles:
            handle.remove()


def _named_parameters(chunks: Chunks, program: Program) -> Iterator[tuple[str, torch.nn.Parameter]]:
    stages = program.placement.stages_of(program.rank)
    for stage, chunk in zip(stages, chunks, strict=True):
        for name, parameter in chunk.named_parameters():
            yield f"{name.removeprefix('module.').removeprefix('module.')} of stage {stage}", parameter


def _numbers(results: list[Any]) -> Tensor:
    """All numbers in ``results``, of any nesting, one after another."""
    numbers = []
    for leaf in tree_leaves(results):
        if isinstance(leaf, Tensor):
            values = leaf.values() if leaf.is_nested and leaf.layout is torch.jagged else leaf
            numbers.append(values.detach().reshape(-1).cpu().double())
        elif isinstance(leaf, (int, float)):
            numbers.append(torch.tensor([leaf], dtype=torch.float64))
    return torch.cat(numbers) if numbers else torch.zeros(0, dtype=torch.float64)


def _compared(
    expected: dict[str, Tensor], values: Iterator[tuple[str, Tensor]]
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Returns sizes of the differences, by name, see :class:`.Difference`, and copies of the ``values`` that differ."""
    sizes, copies = dict.fromkeys(expected, math.inf), dict[str, Tensor]()
    for name, value in values:
        before, now = expected.get(name), _on_host(value)
        size = math.inf if before is None else _difference(before, now)
        if size is None:
            del sizes[name]
        else:
            sizes[name], copies[name] = size, now
    return sizes, copies


def _difference(value: Tensor, reference: Tensor) -> float | None:
    if value.shape != reference.shape:
        return math.inf
    if torch.equal(value, reference) or torch.equal(_bits(value), _bits(reference)):
        return None
    wide = torch.promote_types(value.dtype, torch.float32)
    norm = torch.linalg.vector_norm(reference, dtype=wide).item()
    size = torch.linalg.vector_norm(value.to(wide) - reference.to(wide)).item()
    return size / norm if norm and size == size else math.inf


def _bits(value: Tensor) -> Tensor:
    """Bytes of a tensor: NaN equals NaN."""
    return value.contiguous().view(-1).view(torch.uint8)
