"""Schedules with O and L inserted at any cost: a planner would not make them, but a run must support them.

And the piece that runs them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from msgspec.structs import asdict

from benchmarks.emulated_ranks import RankError
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.kinds import Kind, Pass
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.text_forms import to_csv
from tools.gpu_tests.comparing import FP32, compared, same_bits
from tools.gpu_tests.pieces import FAULT, Row, Setting

Distances = Callable[[int, int], tuple[int, int] | None]
"""For a stage and a microbatch, how many passes after its F its O stands, and how many before its I or B its L; None
for neither."""


def offloaded(schedule: Schedule, distances: Distances = lambda stage, microbatch: (2, 2)) -> Schedule:
    """Returns ``schedule`` with O and L; where they would cross L comes right after O."""
    rows = (_with_copies(row, distances) for row in schedule.order)
    return replace(schedule, order=tuple(rows))


def _with_copies(row: tuple[Pass, ...], distances: Distances) -> tuple[Pass, ...]:
    backward = {(work.stage, work.microbatch): at for at, work in enumerate(row) if work.kind in (Kind.I, Kind.B)}
    placed: list[tuple[int, int, Pass]] = [(at, 2, work) for at, work in enumerate(row)]
    for at, work in enumerate(row):
        key = work.stage, work.microbatch
        chosen = distances(*key) if work.kind is Kind.F and key in backward else None
        if chosen is not None:
            end = backward[key]
            out = min(at + 1 + chosen[0], end)
            placed.append((out, 0, work._replace(kind=Kind.O)))
            placed.append((max(end - chosen[1], out), 1, work._replace(kind=Kind.L)))
    return tuple(work for _, _, work in sorted(placed, key=lambda each: each[:2]))


_RANKS, _MICROBATCHES = 2, 6


def to_the_host(setting: Setting) -> Iterator[Row]:
    """Compares jobs that offload all activations with jobs that offload none; then times copies alone."""
    import torch

    from tools._copy_rates import copy_rates
    from tools.gpu_tests import jobs
    from tools.gpu_tests.one_gpu import fault_of
    from tools.gpu_tests.watchers import NoWaits

    iterations = 2 if setting.on_cpu else 5
    flags = [*jobs.size_flags(setting, 2 * _RANKS, usual=False), *jobs.kernel_flags(setting)]
    flags += ["--train-iters", str(iterations), "--global-batch-size", str(_MICROBATCHES), "--distributed-backend"]
    flags += ["gloo", "--pipeline-model-parallel-size", str(_RANKS)]
    with tempfile.TemporaryDirectory() as folder:

        def trained(name: str, schedule: Schedule, watcher: type[NoWaits] | None = None) -> jobs.Ran:
            path = Path(folder, name)
            path.write_text(to_csv(schedule))
            job = jobs.Job((*flags, "--pipeline-schedule", str(path)), watcher, exact=True)
            return jobs.train(_RANKS, job, shared=True)

        for name in ("v-half",) if setting.on_cpu else ("1f1b", "zb-1p", "v-half"):
            schedule = plan(Request(name, _RANKS, _MICROBATCHES))
            stays, repeated = trained("stays.csv", schedule), trained("repeated.csv", schedule)
            row: Row = {"schedule": name, "ranks": _RANKS}
            try:
                goes = trained("goes.csv", offloaded(schedule), NoWaits)
            except RankError as error:
                yield row | {FAULT: fault_of(error)}
            else:
                row |= compared(goes, stays, iterations, FP32, to_the_bit=same_bits(stays, repeated))
                waits = sorted({wait for found in goes.found for wait in found})
                yield row | {FAULT: row[FAULT] or (waits[0] if waits else "")}
    rates = copy_rates(torch.empty(0, device="cuda").device)
    yield {f"{way.replace('_', ' ')}, GB/s": rate for way, rate in asdict(rates).items()} | {FAULT: ""}
