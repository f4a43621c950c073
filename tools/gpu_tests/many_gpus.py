"""The pieces that need several GPUs, one for each rank, over NCCL, where a wrong order hangs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.emulated_ranks import RankError
from megatron.schedules.schedule.schedule import Schedule
from tools.gpu_tests import jobs
from tools.gpu_tests.comparing import BF16, FP32, compared
from tools.gpu_tests.layouts import Layout, layout_of
from tools.gpu_tests.one_gpu import fault_of
from tools.gpu_tests.pieces import FAMILIES, FAULT, VOCABULARY, Row, Setting, Skipped
from tools.gpu_tests.timeline import against_the_simulator
from tools.gpu_tests.watchers import LittleMemory, Spans, Timed

_FEW_ON_CPU = ("zb-1p", "v-half")
_ITERATIONS = 20


def _pipeline_alone(setting: Setting) -> Layout:
    return layout_of("pp", setting.gpus or 4, True)


def _flags(
    setting: Setting, layout: Layout, schedules: Sequence[str], iterations: int, *, te: bool | None = None
) -> list[str]:
    flags = jobs.size_flags(setting, jobs.planned_layers(layout.pipeline, schedules), usual=True)
    flags += jobs.kernel_flags(setting, te=jobs.te_here(setting) if te is None else te)
    flags += ["--pipeline-model-parallel-size", str(layout.pipeline), *layout.flags]
    batch = 2 * layout.pipeline * layout.data
    return [*flags, "--global-batch-size", str(batch), "--train-iters", str(iterations)]


def trains(setting: Setting, name: str, connections: int, family: str) -> Iterator[Row]:
    """Compares every schedule of ``family`` with stock's 1F1B of the same layout."""
    yield from _against_stock(setting, name, connections, FAMILIES[family])


def vocabulary(setting: Setting, name: str, connections: int) -> Iterator[Row]:
    """Trains with vocabulary parallelism, whose collectives run in the background of passes."""
    yield from _against_stock(setting, name, connections, ("1f1b", "zb-1p", "v-half", "v-zb"), VOCABULARY)


def userbuffers(setting: Setting) -> Iterator[Row]:
    """Trains with Transformer Engine's Userbuffers, also in stock's job."""
    if fault := jobs.te_fault():
        raise Skipped(fault)
    overlap = ("--tp-comm-overlap", *(("--bf16", "--tp-comm-bootstrap-backend", "gloo") if setting.on_cpu else ()))
    yield from _against_stock(setting, "tp-pp", 1, ("zb-1p", "v-half", "v-zb"), te=True, overlap=overlap)


def _against_stock(
    setting: Setting,
    name: str,
    connections: int,
    schedules: Sequence[str],
    *more: str,
    te: bool | None = None,
    overlap: Sequence[str] = (),
) -> Iterator[Row]:
    # Where there is no GPU, as few ranks as show the layout.
    gpus = setting.gpus or (8 if name == "tp-pp-dp" else 4)
    layout = layout_of(name, gpus, jobs.marks_norms(setting))
    schedules = [s for s in schedules if not setting.on_cpu or s in _FEW_ON_CPU]
    iterations = 2 if setting.on_cpu else _ITERATIONS
    flags = [*_flags(setting, layout, schedules, iterations, te=te), *overlap]
    what: Row = {"ranks": layout.world, "pipeline": layout.pipeline} | ({"note": layout.note} if layout.note else {})
    stock = jobs.train(layout.world, jobs.Job(tuple(flags), connections=connections))
    for schedule in schedules:
        row = {"schedule": schedule} | what
        if not jobs.can_plan(schedule):
            yield row | {FAULT: None}
            continue
        try:
            asked = (*flags, *jobs.schedule_flags(schedule), *more)
            ours = jobs.train(layout.world, jobs.Job(asked, connections=connections))
        except RankError as error:
            yield row | {FAULT: fault_of(error)}
        else:
            yield row | compared(
                ours, stock, iterations, FP32 if setting.on_cpu and not overlap else BF16, to_the_bit=False
            )


def cold_start(setting: Setting) -> Iterator[Row]:
    """Trains in new interpreters with empty kernel caches."""
    layout, iterations = _pipeline_alone(setting), 2
    for schedule in _FEW_ON_CPU[1:] if setting.on_cpu else ("zb-1p", "v-half", "v-zb"):
        flags = [*_flags(setting, layout, (schedule,), iterations), "--timing-log-level", "2"]
        # One rank after another compiles in its first pass, while all behind it wait: longer than elsewhere.
        flags += ["--distributed-timeout-minutes", "5"]
        if not setting.on_cpu and jobs.can_compile():
            flags = [flag for flag in flags if flag not in jobs.COMPILES_NOTHING]
        with tempfile.TemporaryDirectory(prefix="cold-") as folder:
            caches = ("CUDA_CACHE_PATH", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
            environment = {name: str(Path(folder, name)) for name in caches} | {"CUDA_MODULE_LOADING": "LAZY"}
            environment["TORCHDYNAMO_DISABLE"] = "0" if jobs.can_compile() else "1"
            job = jobs.Job((*flags, *jobs.schedule_flags(schedule)))
            row: Row = {"schedule": schedule, "ranks": layout.world}
            try:
                ran = jobs.train(layout.world, job, fresh=True, environment=environment)
            except RankError as error:
                yield row | {FAULT: fault_of(error)}
            else:
                yield row | {"iterations": len(ran.losses), FAULT: _too_few(ran, iterations)}


def little_memory(setting: Setting) -> Iterator[Row]:
    """Trains with little memory, and compares losses with a job that has enough."""
    layout, iterations = _pipeline_alone(setting), 3 if setting.on_cpu else 10
    for schedule in _FEW_ON_CPU[1:] if setting.on_cpu else ("1f1b", "zb-1p", "v-half", "v-zb"):
        flags = (*_flags(setting, layout, (schedule,), iterations), *jobs.schedule_flags(schedule))
        row: Row = {"schedule": schedule, "ranks": layout.world}
        try:
            plenty = jobs.train(layout.world, jobs.Job(flags))
            scarce = jobs.train(layout.world, jobs.Job(flags, LittleMemory))
        except RankError as error:
            yield row | {FAULT: fault_of(error)}
            continue
        row |= {"retries, by rank": " ".join(map(str, scarce.found))}
        row |= compared(scarce, plenty, iterations, FP32 if setting.on_cpu else BF16, to_the_bit=False)
        if not setting.on_cpu and not all(scarce.found):
            row[FAULT] = row[FAULT] or "a rank's allocator never tried again: nothing was shown"
        yield row


def timeline(setting: Setting) -> Iterator[Row]:
    """Measures device times of every pass, without the first iterations."""
    layout, iterations = _pipeline_alone(setting), 3 if setting.on_cpu else 10
    for schedule in _FEW_ON_CPU if setting.on_cpu else ("1f1b", "zb-1p", "v-min", "v-half", "v-zb", "interleaved-1f1b"):
        flags = (*_flags(setting, layout, (schedule,), iterations), *jobs.schedule_flags(schedule))
        row: Row = {"schedule": schedule, "ranks": layout.world}
        try:
            ran = jobs.train(layout.world, jobs.Job(flags, Spans))
            found: list[Timed] = ran.found
            measured = [list(each) for each in zip(*(rank.iterations[2:] for rank in found), strict=True)]
            placement, microbatches, *_ = found[0]
            ordered = Schedule(schedule, placement, microbatches, tuple(rank.order for rank in found))
            figures = against_the_simulator(ordered, measured)
        except (RankError, ValueError) as error:
            yield row | {FAULT: fault_of(error)}
        else:
            yield row | figures | {FAULT: _too_few(ran, iterations)}


def _too_few(ran: jobs.Ran, iterations: int) -> str:
    return "" if len(ran.losses) == iterations else f"{len(ran.losses)} of {iterations} iterations"
