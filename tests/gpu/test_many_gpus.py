"""What several GPUs show, one for each rank, over NCCL, where a wrong order hangs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.schedules.schedule.schedule import Schedule
from tests.gpu.comparing import BF16, FP32, compared
from tests.gpu.settings import (
    CONNECTIONS,
    FAMILIES,
    FEWEST_OF_MANY,
    LAYOUTS,
    SCHEDULES,
    VOCABULARY,
    Layout,
    Setting,
    Shows,
    layout_of,
)
from tests.gpu.timeline import against_the_simulator

pytestmark = pytest.mark.gpu(FEWEST_OF_MANY)

FEW_ON_CPU = ("zb-1p", "v-half")
each_number_of_queues = pytest.mark.parametrize("connections", CONNECTIONS)


def tried(setting: Setting, schedule: str, few: Sequence[str] = FEW_ON_CPU) -> None:
    if setting.on_cpu and schedule not in few:
        pytest.skip(f"on a CPU only {', '.join(few)} are tried")


def flags_of(
    jobs: Any, setting: Setting, layout: Layout, schedule: str, iterations: int, *, te: bool | None = None
) -> list[str]:
    family = next(family for family in FAMILIES.values() if schedule in family)
    flags = jobs.size_flags(setting, jobs.planned_layers(layout.pipeline, family), usual=True)
    flags += jobs.kernel_flags(setting, te=jobs.te_here(setting) if te is None else te)
    flags += ["--pipeline-model-parallel-size", str(layout.pipeline), *layout.flags]
    batch = 2 * layout.pipeline * layout.data
    return [*flags, "--global-batch-size", str(batch), "--train-iters", str(iterations)]


def pipeline_alone(setting: Setting) -> Layout:
    return layout_of("pp", setting.gpus or 4, True)


def same_as_stock(
    jobs: Any,
    shows: Shows,
    setting: Setting,
    name: str,
    connections: int,
    schedule: str,
    *more: str,
    te: bool | None = None,
    overlap: Sequence[str] = (),
) -> None:
    """Compares a job with stock's 1F1B of the same layout. ``more`` is given to ours alone, ``overlap`` to both."""
    # Where there is no GPU, as few ranks as show the layout.
    layout = layout_of(name, setting.gpus or (8 if name == "tp-pp-dp" else 4), jobs.marks_norms(setting))
    iterations = 2 if setting.on_cpu else 20
    flags = (*flags_of(jobs, setting, layout, schedule, iterations, te=te), *overlap)
    stock = jobs.stock(layout.world, jobs.Job(flags, connections=connections))
    asked = (*flags, *jobs.schedule_flags(schedule), *more)
    ours = jobs.train(layout.world, jobs.Job(asked, connections=connections))
    figures, fault = compared(
        ours, stock, iterations, FP32 if setting.on_cpu and not overlap else BF16, to_the_bit=False
    )
    shows({"ranks": layout.world, "pipeline": layout.pipeline, "note": layout.note} | figures, fault)


def same_as_without(
    jobs: Any, shows: Shows, setting: Setting, name: str, schedule: str, iterations: int, graphs: str
) -> None:
    """Compares a job that has the flags ``graphs`` with the same job without them."""
    layout = layout_of(name, setting.gpus or 4, jobs.marks_norms(setting))
    flags = [*flags_of(jobs, setting, layout, schedule, iterations, te=True), *jobs.schedule_flags(schedule)]
    flags += ["--bf16", "--te-rng-tracker", "--no-check-for-nan-in-loss-and-grad"]
    plain, graphed = (
        jobs.train(layout.world, jobs.Job((*flags, *more), jobs.watchers.Peak, exact=True))
        for more in ((), graphs.split())
    )
    figures, fault = compared(graphed, plain, iterations, BF16, to_the_bit=False)
    shows({"peak memory, GiB, by rank": graphed.found, "without graphs": plain.found} | figures, fault)


@each_number_of_queues
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_trains_as_stock_does_over_nccl(
    jobs: Any, shows: Shows, setting: Setting, schedule: str, layout: str, connections: int
):
    tried(setting, schedule)
    jobs.needs_planner(schedule)
    same_as_stock(jobs, shows, setting, layout, connections, schedule)


@each_number_of_queues
@pytest.mark.parametrize("schedule", ["1f1b", "zb-1p", "v-half", "v-zb"])
def test_vocabulary_parallelism_trains_as_stock_does_over_nccl(
    jobs: Any, shows: Shows, setting: Setting, schedule: str, connections: int
):
    """Its collectives run in the background of passes, beside those of tensor and sequence parallelism."""
    tried(setting, schedule)
    same_as_stock(jobs, shows, setting, "tp-pp", connections, schedule, VOCABULARY)


@pytest.mark.parametrize("schedule", ["zb-1p", "v-half", "v-zb"])
def test_userbuffers_train_as_stock_does_with_them(jobs: Any, shows: Shows, setting: Setting, schedule: str):
    tried(setting, schedule)
    if fault := jobs.te_fault():
        pytest.skip(fault)
    overlap = ("--tp-comm-overlap", *(("--bf16", "--tp-comm-bootstrap-backend", "gloo") if setting.on_cpu else ()))
    same_as_stock(jobs, shows, setting, "tp-pp", 1, schedule, te=True, overlap=overlap)


@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-1p", "v-half", "v-zb"])
def test_cuda_graphs_train_as_the_job_without_them(
    jobs: Any, shows: Shows, setting: Setting, schedule: str, layout: str
):
    """Replays beside messages, collectives inside captures, and no more memory than both jobs say."""
    tried(setting, schedule)
    if fault := jobs.graphs_fault():
        pytest.skip(fault)
    iterations = 2 if setting.on_cpu else 20
    graphs = "--cuda-graph-impl transformer_engine --cuda-graph-warmup-steps 0"
    same_as_without(jobs, shows, setting, layout, schedule, iterations, graphs)


@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-1p", "v-half", "v-zb"])
def test_a_graph_of_a_whole_iteration_trains_as_the_job_without_it(
    jobs: Any, shows: Shows, setting: Setting, schedule: str, layout: str
):
    """Messages and collectives on their streams inside one capture, and how much memory the pool adds."""
    tried(setting, schedule)
    if fault := jobs.te_fault():
        pytest.skip(fault)
    iterations = 3 if setting.on_cpu else 20
    graph = "--cuda-graph-impl full_iteration --cuda-graph-warmup-steps 1"
    same_as_without(jobs, shows, setting, layout, schedule, iterations, graph)


@pytest.mark.parametrize("schedule", ["zb-1p", "v-half", "v-zb"])
def test_a_cold_start_does_not_hang(jobs: Any, setting: Setting, tmp_path: Path, schedule: str):
    """New interpreters compile and load every kernel within the first program, with timers in every pass."""
    tried(setting, schedule, FEW_ON_CPU[1:])
    layout = pipeline_alone(setting)
    flags = [*flags_of(jobs, setting, layout, schedule, 2), "--timing-log-level", "2"]
    # One rank after another compiles in its first pass, while all behind it wait: longer than elsewhere.
    flags += ["--distributed-timeout-minutes", "5"]
    if not setting.on_cpu and jobs.can_compile():
        flags = [flag for flag in flags if flag not in jobs.COMPILES_NOTHING]
    caches = ("CUDA_CACHE_PATH", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    environment = {name: str(tmp_path / name) for name in caches} | {"CUDA_MODULE_LOADING": "LAZY"}
    environment["TORCHDYNAMO_DISABLE"] = "0" if jobs.can_compile() else "1"
    job = jobs.Job((*flags, *jobs.schedule_flags(schedule)))
    assert len(jobs.train(layout.world, job, fresh=True, environment=environment).losses) == 2


@pytest.mark.parametrize("schedule", ["1f1b", "zb-1p", "v-half", "v-zb"])
def test_little_memory_hangs_nothing_and_changes_no_loss(jobs: Any, shows: Shows, setting: Setting, schedule: str):
    """Near its end the allocator gives blocks back and tries again."""
    tried(setting, schedule, FEW_ON_CPU[1:])
    layout, iterations = pipeline_alone(setting), 3 if setting.on_cpu else 10
    flags = (*flags_of(jobs, setting, layout, schedule, iterations), *jobs.schedule_flags(schedule))
    plenty = jobs.train(layout.world, jobs.Job(flags))
    scarce = jobs.train(layout.world, jobs.Job(flags, jobs.watchers.LittleMemory))
    figures, fault = compared(scarce, plenty, iterations, FP32 if setting.on_cpu else BF16, to_the_bit=False)
    shows({"retries, by rank": scarce.found} | figures, fault)
    assert setting.on_cpu or all(scarce.found), "a rank's allocator never tried again: nothing was shown"


@pytest.mark.parametrize("schedule", ["1f1b", "zb-1p", "v-min", "v-half", "v-zb", "interleaved-1f1b"])
def test_timeline_of_passes_is_told_beside_the_simulators(jobs: Any, shows: Shows, setting: Setting, schedule: str):
    """Without the first iterations, at the costs measured; how far off is in the figures."""
    tried(setting, schedule)
    layout, iterations = pipeline_alone(setting), 3 if setting.on_cpu else 10
    flags = (*flags_of(jobs, setting, layout, schedule, iterations), *jobs.schedule_flags(schedule))
    ran = jobs.train(layout.world, jobs.Job(flags, jobs.watchers.Spans))
    measured = [list(each) for each in zip(*(rank.iterations[2:] for rank in ran.found), strict=True)]
    placement, microbatches, *_ = ran.found[0]
    ordered = Schedule(schedule, placement, microbatches, tuple(rank.order for rank in ran.found))
    shows(against_the_simulator(ordered, measured))
    assert len(ran.losses) == iterations
