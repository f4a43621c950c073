"""What one GPU shows. Ranks share it, over NCCL where it allows that (2.30 or newer), else over gloo and the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict

from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.text_forms import to_csv
from tests.gpu.comparing import BF16, FP32, compared, same_bits
from tests.gpu.settings import FAMILIES, FEW, SCHEDULES, VOCABULARY, Setting, Shows
from tests.support.offloaded import offloaded

pytestmark = pytest.mark.gpu

# Whether layers are Transformer Engine's.
KINDS = {"local layers": False, "Transformer Engine's": True}
# The tiny model for a CPU is too narrow for blocks of 32 numbers.
WIDER = "--hidden-size 64 --seq-length 64 --max-position-embeddings 64"
# Megatron's recipes, and the oldest GPUs, by compute capability, that have them.
FP4 = "nvfp4"
RECIPES = {"tensorwise": (8, 9), "delayed": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0), FP4: (10, 0)}
# What the graphs hold, and flags of the model.
EXPERTS = "--num-experts 4 --moe-router-topk 2 --disable-bias-linear --moe-token-dispatcher-type alltoall"
GRAPHED = {
    "whole layers": ("", ""),
    "attention": ("--cuda-graph-modules attn", ""),
    "attention and MLP": ("--cuda-graph-modules attn mlp", ""),
    "router of experts": ("--cuda-graph-modules attn moe_router moe_preprocess", EXPERTS),
} | {recipe: ("", f"--fp8-format hybrid --fp8-recipe {recipe}") for recipe in ("tensorwise", "delayed", "blockwise")}
WITH_GRAPHS = (*FEW, "v-zb")
each_kind_of_layers = pytest.mark.parametrize("te", KINDS.values(), ids=KINDS)


def of_every_kind(setting: Setting, schedule: str) -> None:
    """Skips on a CPU all schedules but the few that show every step."""
    if setting.on_cpu and schedule not in FEW:
        pytest.skip(f"on a CPU only {', '.join(FEW)} are tried")


def needs_te(jobs: Any, setting: Setting, te: bool) -> None:
    if te and not jobs.te_here(setting):
        pytest.skip("Transformer Engine's layers cannot be used here")


def flags_of(jobs: Any, iterations: int, ranks: int, batch: int) -> list[str]:
    sizes = ["--train-iters", str(iterations), "--global-batch-size", str(batch)]
    sizes += ["--distributed-backend", jobs.backend_of_a_shared_gpu()]
    return [*sizes, *(["--pipeline-model-parallel-size", str(ranks)] if ranks > 1 else [])]


def same_as_stock(
    jobs: Any, shows: Shows, setting: Setting, schedule: str, ranks: int, *, more: Sequence[str] = (), **asked: Any
) -> None:
    """Compares a job with stock's on one rank, for which gloo has no messages of a GPU.

    Args:
        more: flags of our job alone.
        asked: of :func:`model_flags`.
    """
    iterations = 2 if setting.on_cpu else 5
    family = next(family for family in FAMILIES.values() if schedule in family)
    flags = model_flags(jobs, setting, jobs.planned_layers(ranks, family), **asked)
    its = jobs.Job((*flags, *flags_of(jobs, iterations, 1, 7)), exact=True)
    stock, again = (jobs.stock(1, its, shared=True, number=number) for number in range(2))
    recipe = asked.get("recipe", "")
    tolerance = BF16 if recipe else FP32
    # NVFP4 rounds gradients at random, so an order of passes has its own bits.
    to_the_bit = same_bits(stock, again) and recipe != FP4
    _, fault = compared(again, stock, iterations, tolerance, to_the_bit=False)
    assert not fault, f"stock against itself: {fault}"
    job = jobs.Job((*flags, *flags_of(jobs, iterations, ranks, 7), *jobs.schedule_flags(schedule), *more), exact=True)
    ours = jobs.train(ranks, job, shared=True)
    # What adds up in another order has another last digit.
    shows(*compared(ours, stock, iterations, tolerance, to_the_bit=to_the_bit and not more))


def model_flags(
    jobs: Any, setting: Setting, layers: int, *, fused: bool = False, recipe: str = "", primary: bool = False
) -> list[str]:
    """Returns flags of a model in fp32, or of Transformer Engine's linears in FP8.

    Args:
        fused: whether gradients are accumulated by Apex's kernel.
        recipe: of FP8.
        primary: whether there are no bf16 weights.
    """
    flags = [*jobs.size_flags(setting, layers, usual=False), *jobs.kernel_flags(setting, te=bool(recipe))]
    if recipe:
        how = ["--fp4-format", "e2m1"] if recipe == FP4 else ["--fp8-format", "hybrid", "--fp8-recipe", recipe]
        flags += ["--bf16", *how, *(WIDER.split() if setting.on_cpu else ())]
    if primary:
        flags += ["--fp8-param-gather", "--use-distributed-optimizer"]
        flags += ["--reuse-grad-buf-for-mxfp8-param-ag"] if recipe == "mxfp8" else []
    if fused:
        flags.remove("--no-gradient-accumulation-fusion")
    return flags


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_trains_as_stock_does(jobs: Any, shows: Shows, setting: Setting, schedule: str, ranks: int):
    of_every_kind(setting, schedule)
    if setting.on_cpu and ranks == 2:
        pytest.skip("on a CPU only four ranks are tried")
    jobs.needs_planner(schedule)
    same_as_stock(jobs, shows, setting, schedule, ranks)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", FEW)
def test_vocabulary_parallelism_trains_as_stock_does(
    jobs: Any, shows: Shows, setting: Setting, schedule: str, ranks: int
):
    if setting.on_cpu and ranks == 2:
        pytest.skip("on a CPU only four ranks are tried")
    same_as_stock(jobs, shows, setting, schedule, ranks, more=(VOCABULARY,))


@pytest.mark.parametrize("schedule", FEW)
def test_gradients_accumulated_by_apexs_kernel_are_stocks(jobs: Any, shows: Shows, setting: Setting, schedule: str):
    if setting.on_cpu or not jobs.times.accumulates_fused():
        pytest.skip("Apex's fused_weight_gradient_mlp_cuda is not installed")
    same_as_stock(jobs, shows, setting, schedule, 2, fused=True)


@pytest.mark.parametrize("primary", [False, True], ids=["bf16 weights", "FP8 weights"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("schedule", FEW[1:])
def test_fp8_and_fp4_train_as_stock_does(
    jobs: Any, shows: Shows, setting: Setting, schedule: str, recipe: str, primary: bool
):
    if fault := jobs.te_fault():
        pytest.skip(fault)
    if jobs.capability() < RECIPES[recipe] or (primary and recipe == FP4):
        pytest.skip("the device does not compute it")
    same_as_stock(jobs, shows, setting, schedule, 2, recipe=recipe, primary=primary)


def test_te_linears_split_give_the_bits_of_their_whole_backward(jobs: Any, setting: Setting):
    """With and without bias and fused accumulation, in several orders."""
    if fault := jobs.te_fault():
        pytest.skip(fault)
    faults = jobs.alone(partial(jobs.te_cases, "cpu" if setting.on_cpu else "cuda"))
    assert faults and not any(faults.values()), {case: fault for case, fault in faults.items() if fault}


def with_recompute(schedule: Schedule) -> Schedule:
    """Returns the schedule with an R for two microbatches of three, one pass before its backward."""
    rows = []
    for row in schedule.order:
        found = list(row)
        for work in row:
            if work.kind in (Kind.I, Kind.B) and work.microbatch % 3:
                forward = found.index(work._replace(kind=Kind.F))
                found.insert(max(forward + 1, found.index(work) - 1), work._replace(kind=Kind.R))
        rows.append(tuple(found))
    return replace(schedule, order=tuple(rows))


@each_kind_of_layers
@pytest.mark.parametrize("schedule", FEW)
def test_recompute_with_dropout_changes_no_gradient(
    jobs: Any, shows: Shows, setting: Setting, tmp_path: Path, schedule: str, te: bool
):
    needs_te(jobs, setting, te)
    iterations = 2 if setting.on_cpu else 5
    flags = [*jobs.size_flags(setting, 8, usual=False), *flags_of(jobs, iterations, 2, 7), "--attention-dropout", "0.1"]
    flags += ["--hidden-dropout", "0.1", *jobs.kernel_flags(setting, te=te), *(["--bf16"] if te else [])]
    made = plan(Request(schedule, 2, 7))
    files = [tmp_path / "plain.csv", tmp_path / "recompute.csv"]
    for path, order in zip(files, (made, with_recompute(made)), strict=True):
        path.write_text(to_csv(order))
    plain, repeated, ours = (
        jobs.train(2, jobs.Job((*flags, "--pipeline-schedule", str(path)), exact=True), shared=True)
        for path in (files[0], *files)
    )
    shows(*compared(ours, plain, iterations, BF16 if te else FP32, to_the_bit=same_bits(plain, repeated)))


@each_kind_of_layers
@pytest.mark.parametrize("schedule", [*FEW, "interleaved-1f1b", "v-min", "v-zb"])
def test_no_pass_waits_for_the_device_after_the_first_iteration(
    jobs: Any, shows: Shows, setting: Setting, schedule: str, te: bool
):
    """By torch's own check round each pass."""
    of_every_kind(setting, schedule)
    needs_te(jobs, setting, te)
    flags = [*jobs.size_flags(setting, 8, usual=False), *flags_of(jobs, 4, 2, 4), "--timing-log-level", "2"]
    flags += [*jobs.kernel_flags(setting, te=te), *(["--bf16"] if te else []), *jobs.schedule_flags(schedule)]
    ran = jobs.train(2, jobs.Job(tuple(flags), jobs.watchers.NoWaits), shared=True)
    waits = sorted({wait for found in ran.found for wait in found})
    shows({"iterations": len(ran.losses)}, waits[0] if waits else "")


def same_as_without_graphs(
    jobs: Any, shows: Shows, setting: Setting, schedule: str, graphs: str, model: str = ""
) -> None:
    """Compares a job that has the flags ``graphs`` with the same job without them; tells the peak memory of both."""
    iterations = 3 if setting.on_cpu else 5
    flags = [*jobs.size_flags(setting, 8, usual=False), *flags_of(jobs, iterations, 2, 7)]
    flags += [*jobs.kernel_flags(setting, te=True), *(WIDER.split() if setting.on_cpu else ())]
    flags += ["--bf16", "--te-rng-tracker", "--no-check-for-nan-in-loss-and-grad", *jobs.schedule_flags(schedule)]
    flags += model.split()
    plain, repeated, graphed = (
        jobs.train(2, jobs.Job((*flags, *more), jobs.watchers.Peak, exact=True), shared=True)
        for more in ((), (), graphs.split())
    )
    figures, fault = compared(graphed, plain, iterations, BF16, to_the_bit=same_bits(plain, repeated))
    shows({"peak memory, GiB, by rank": graphed.found, "without graphs": plain.found} | figures, fault)


@pytest.mark.parametrize("graphed", GRAPHED)
@pytest.mark.parametrize("schedule", WITH_GRAPHS)
def test_cuda_graphs_of_layers_change_no_gradient(
    jobs: Any, shows: Shows, setting: Setting, schedule: str, graphed: str
):
    of_every_kind(setting, schedule)
    if fault := jobs.graphs_fault():
        pytest.skip(fault)
    if graphed in RECIPES and jobs.capability() < RECIPES[graphed]:
        pytest.skip("the device does not compute it")
    modules, model = GRAPHED[graphed]
    graphs = f"--cuda-graph-impl transformer_engine --cuda-graph-warmup-steps 0 {modules}"
    same_as_without_graphs(jobs, shows, setting, schedule, graphs, model)


@pytest.mark.parametrize("schedule", WITH_GRAPHS)
def test_a_graph_of_a_whole_iteration_changes_no_gradient(jobs: Any, shows: Shows, setting: Setting, schedule: str):
    """Losses and norms of the iterations that are replayed: the first has no graph."""
    of_every_kind(setting, schedule)
    if fault := jobs.te_fault():
        pytest.skip(fault)
    if not setting.on_cpu and jobs.backend_of_a_shared_gpu() == "gloo":
        pytest.skip("a message through the host cannot be captured, and this NCCL lets no ranks share a GPU")
    graph = "--cuda-graph-impl full_iteration --cuda-graph-warmup-steps 1"
    same_as_without_graphs(jobs, shows, setting, schedule, graph)


@pytest.mark.parametrize("schedule", FEW)
def test_offload_changes_no_gradient_and_waits_for_nothing(
    jobs: Any, shows: Shows, setting: Setting, tmp_path: Path, schedule: str
):
    """Activations of all microbatches go to the host and come back."""
    iterations = 2 if setting.on_cpu else 5
    flags = [*jobs.size_flags(setting, 4, usual=False), *jobs.kernel_flags(setting), *flags_of(jobs, iterations, 2, 6)]
    made = plan(Request(schedule, 2, 6))
    stay, go = tmp_path / "stay.csv", tmp_path / "go.csv"
    stay.write_text(to_csv(made))
    go.write_text(to_csv(offloaded(made)))

    def trained(path: Path, watcher: Any = None) -> Any:
        job = jobs.Job((*flags, "--pipeline-schedule", str(path)), watcher, exact=True)
        return jobs.train(2, job, shared=True)

    stays, repeated, goes = trained(stay), trained(stay), trained(go, jobs.watchers.NoWaits)
    figures, fault = compared(goes, stays, iterations, FP32, to_the_bit=same_bits(stays, repeated))
    waits = sorted({wait for found in goes.found for wait in found})
    shows(figures, fault or (waits[0] if waits else ""))


def test_offload_copies_at_these_speeds(jobs: Any, shows: Shows):
    """Each way alone, and both at once."""
    rates = asdict(jobs.alone(jobs.rates))
    shows({f"{way.replace('_', ' ')}, GB/s": rate for way, rate in rates.items()})
    assert all(rate > 0 for rate in rates.values())


@pytest.mark.parametrize("schedule", [*FEW, "v-half with copies"])
def test_profile_of_a_job_is_what_independent_events_measure(
    jobs: Any, shows: Shows, setting: Setting, tmp_path: Path, schedule: str
):
    """Within 3 %, and no mark of the recorder waits for the device."""
    from megatron.schedules.job.measuring import COSTS
    from megatron.schedules.measure.cost_file import read_profile

    name, _, copies = schedule.partition(" ")
    made = plan(Request(name, 2, 6))
    csv, last = tmp_path / "schedule.csv", 5
    csv.write_text(to_csv(offloaded(made) if copies else made))
    flags = [*jobs.size_flags(setting, 4, usual=False), *jobs.kernel_flags(setting), *flags_of(jobs, last, 2, 6)]
    flags += ["--pipeline-schedule", str(csv), "--pipeline-measure", f"{tmp_path}:2-{last}"]
    ran = jobs.train(2, jobs.Job(tuple(flags), jobs.watchers.WithStock), shared=True)
    profile = read_profile(tmp_path / COSTS)
    shows(*jobs.watchers.against(profile, ran.found, strict=not setting.on_cpu))


@pytest.mark.parametrize("schedule", ["v-zb", "adaptive"])
def test_replan_keeps_losses_to_the_bit(jobs: Any, shows: Shows, setting: Setting, tmp_path: Path, schedule: str):
    """Within the memory that is left; ranks switch in the same iteration, and bubble and peak are logged."""
    from megatron.schedules.integration.rank_device import STANDIN_VARIABLE
    from megatron.schedules.job.flags import SEARCH_VARIABLE

    iterations, limit = 9, "--pipeline-memory-limit"
    jobs.needs_planner(schedule)
    once, replanning = {
        "v-zb": (("v-zb",), ("v-zb", "--pipeline-replan")),
        "adaptive": (("adaptive:2", limit, "1"), ("adaptive:2", limit, "auto")),
    }[schedule]
    flags = [*jobs.size_flags(setting, 4, usual=False), *jobs.kernel_flags(setting), *flags_of(jobs, iterations, 2, 8)]
    # The bytes are what a CPU's ranks have for activations of the tiny model.
    first, second = (
        jobs.train(
            2,
            jobs.Job((*flags, "--pipeline-schedule", *more), jobs.watchers.Replanning),
            shared=True,
            environment={STANDIN_VARIABLE: "300000", SEARCH_VARIABLE: "0.2"},
        )
        for more in (once, (*replanning, "--pipeline-measure", f"{tmp_path}:2-4"))
    )
    switches, logged = zip(*second.found, strict=True)
    bubbles, peaks = zip(*logged[-1], strict=True)
    shows({"switched in": switches[0], "bubble, %": 100 * bubbles[-1], "peak, MiB": (peaks[-1] or 0.0) / 2**20})
    assert second.losses == first.losses
    assert all(each == switches[0] for each in switches)
    assert len(bubbles) == iterations and all(0 < bubble < 1 for bubble in bubbles)
    assert setting.on_cpu or None not in peaks


def test_memory_of_activations_is_the_plans(jobs: Any, shows: Shows):
    """In every row of the benchmark, within 10 %."""
    from benchmarks import memory, memory_saving

    faults = []
    for row in memory.measure(True, print):
        name = row["schedule"] if "schedule" in row else memory_saving.named(row)
        name = f"{name}, {row['pipeline_size']} ranks, MiB and planned MiB of the worst"
        worst = max(range(len(row["measured_bytes"])), key=row["measured_bytes"].__getitem__)
        shows({name: [round(row[which][worst] / 2**20, 3) for which in ("measured_bytes", "planned_bytes")]})
        if abs(row["worst_error"]) > memory.MOST_ERROR:
            faults.append(f"{name}: {100 * row['worst_error']:+.1f} % off the plan")
    assert not faults


@pytest.mark.parametrize("owner", [True, False], ids=["with its owner", "disowned"])
def test_memory_of_a_message_is_reused_in_its_streams_order(jobs: Any, setting: Setting, owner: bool):
    """However far the host is ahead: not as torch's allocator does for what a stream is recorded to use."""
    if setting.on_cpu:
        pytest.skip("a CPU has no streams")
    assert jobs.alone(partial(jobs.reused_at_once, owner)) == (not owner)


@pytest.mark.parametrize("schedule", FEW)
def test_ranges_of_a_profile_name_every_pass_and_message(jobs: Any, shows: Shows, setting: Setting, schedule: str):
    """As 3F12 and 3SEND_F12, each once and in order; on a GPU the profile has kernels too."""
    if setting.on_cpu and schedule != FEW[-1]:
        pytest.skip(f"on a CPU only {FEW[-1]} is tried")
    flags = [*jobs.size_flags(setting, 8, usual=False), *jobs.kernel_flags(setting), *flags_of(jobs, 3, 2, 4)]
    # Stock's own profiling, which brings the names, is to begin after the end.
    flags += ["--profile", "--profile-step-start", "1000", "--profile-step-end", "1001"]
    job = jobs.Job((*flags, *jobs.schedule_flags(schedule)), jobs.watchers.Profiled)
    for rank, names in enumerate(jobs.train(2, job, shared=True).found):
        shows({f"rank {rank}: names": len(names.seen), f"rank {rank}: kernels": names.kernels})
        assert names.wanted and names.seen == names.wanted
        assert setting.on_cpu or names.kernels
