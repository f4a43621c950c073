"""The pieces that need one GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import memory, memory_saving
from benchmarks.emulated_ranks import RankError
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.text_forms import to_csv
from tools.gpu_tests.comparing import BF16, FP32, compared, same_bits
from tools.gpu_tests.pieces import FAMILIES, FAULT, VOCABULARY, Row, Setting, Skipped

# Where only a few are tried, these: the baseline, one chunk split, a V.
_FEW = ("1f1b", "zb-1p", "v-half")
# Whether layers are Transformer Engine's.
_KINDS = {"local layers": False, "Transformer Engine's": True}
# The tiny model for a CPU is too narrow for blocks of 32 numbers.
_WIDER = "--hidden-size 64 --seq-length 64 --max-position-embeddings 64"
# Megatron's recipes, and the oldest GPUs, by compute capability, that have them.
_FP4 = "nvfp4"
_RECIPES = {"tensorwise": (8, 9), "delayed": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0), _FP4: (10, 0)}


def fault_of(error: Exception) -> str:
    """Returns how a job ended in one line; the rest is in the piece's log."""
    print(error, file=sys.stderr, flush=True)
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def transformer_engine(setting: Setting) -> Iterator[Row]:
    """Tests Transformer Engine's modules, with and without bias and fused accumulation, in several orders."""
    import pretrain_gpt  # noqa: F401 - Transformer Engine is asked about once Megatron is there
    from megatron.schedules.integration.gpu_libraries import te_fault
    from tests.integration import te_itself

    if fault := te_fault():
        raise Skipped(fault)
    for case in te_itself.cases("cpu" if setting.on_cpu else "cuda"):
        try:
            te_itself.check(case)
        except Exception as error:
            yield {"case": str(case), FAULT: fault_of(error)}
        else:
            yield {"case": str(case), FAULT: ""}


def _against_stock(
    setting: Setting,
    schedules: tuple[str, ...],
    sizes: tuple[int, ...],
    *,
    fused: bool = False,
    more: tuple[str, ...] = (),
    fp8: str = "",
    primary: bool = False,
) -> Iterator[Row]:
    """Compares jobs whose ranks share the GPU with stock on one rank, whose messages need a GPU for each rank.

    They compute in fp32, or with Transformer Engine's linears in FP8 of the recipe ``fp8``, with ``primary`` without
    bf16 weights. NVFP4 rounds gradients at random, so an order of passes has its own bits.
    """
    from tools.gpu_tests import jobs

    iterations = 2 if setting.on_cpu else 5
    schedules = tuple(name for name in schedules if not setting.on_cpu or name in _FEW)
    layers = jobs.planned_layers(max(sizes), schedules)
    flags = [*jobs.size_flags(setting, layers, usual=False), *jobs.kernel_flags(setting, te=bool(fp8))]
    if fp8:
        how = ["--fp4-format", "e2m1"] if fp8 == _FP4 else ["--fp8-format", "hybrid", "--fp8-recipe", fp8]
        flags += ["--bf16", *how, *(_WIDER.split() if setting.on_cpu else ())]
    if primary:
        flags += ["--fp8-param-gather", "--use-distributed-optimizer"]
        flags += ["--reuse-grad-buf-for-mxfp8-param-ag"] if fp8 == "mxfp8" else []
    tolerance = BF16 if fp8 else FP32
    flags += ["--train-iters", str(iterations), "--global-batch-size", "7", "--distributed-backend", "gloo"]
    if fused:
        flags.remove("--no-gradient-accumulation-fusion")
    stock, again = (jobs.train(1, jobs.Job(tuple(flags), exact=True), shared=True) for _ in range(2))
    to_the_bit = same_bits(stock, again) and fp8 != _FP4
    itself = compared(again, stock, iterations, tolerance, to_the_bit=False)
    yield {"schedule": "stock, against itself", "ranks": 1} | itself
    for schedule in schedules:
        if not jobs.can_plan(schedule):
            yield {"schedule": schedule, FAULT: None}
            continue
        for size in sizes:
            row: Row = {"schedule": schedule, "ranks": size}
            asked = [*flags, "--pipeline-model-parallel-size", str(size), *jobs.schedule_flags(schedule), *more]
            try:
                ours = jobs.train(size, jobs.Job(tuple(asked), exact=True), shared=True)
            except RankError as error:
                yield row | {FAULT: fault_of(error)}
            else:
                # What adds up in another order has another last digit.
                yield row | compared(ours, stock, iterations, tolerance, to_the_bit=to_the_bit and not more)


def apex_fused(setting: Setting) -> Iterator[Row]:
    """Trains with weight gradients that a kernel adds to ``main_grad`` itself."""
    if setting.on_cpu or find_spec("fused_weight_gradient_mlp_cuda") is None:
        raise Skipped("Apex's fused_weight_gradient_mlp_cuda is not installed")
    yield from _against_stock(setting, _FEW, (2,), fused=True)


def fp8(setting: Setting) -> Iterator[Row]:
    """Trains in FP8 and FP4 with each recipe that the device computes, under schedules that split the backward."""
    from tools.gpu_tests import jobs

    if fault := jobs.te_fault():
        raise Skipped(fault)
    recipes = [recipe for recipe, oldest in _RECIPES.items() if jobs.capability() >= oldest]
    if not recipes:
        raise Skipped("the device computes no FP8")
    for recipe in recipes:
        for primary in (False, True)[: 1 if recipe == _FP4 else 2]:
            for row in _against_stock(setting, _FEW[1:], (2,), fp8=recipe, primary=primary):
                yield {"recipe": recipe, "weights": "FP8" if primary else "bf16"} | row


def shared(setting: Setting, family: str) -> Iterator[Row]:
    """Trains with every schedule of ``family``."""
    yield from _against_stock(setting, FAMILIES[family], (4,) if setting.on_cpu else (2, 4))


def vocabulary(setting: Setting) -> Iterator[Row]:
    """Trains with vocabulary parallelism."""
    yield from _against_stock(setting, _FEW, (4,) if setting.on_cpu else (2, 4), more=(VOCABULARY,))


def recompute(setting: Setting) -> Iterator[Row]:
    """Recomputes most microbatches (R), with dropout, and compares with the same schedule without."""
    from tools.gpu_tests import jobs

    iterations = 2 if setting.on_cpu else 5
    common = [*jobs.size_flags(setting, 8, usual=False), "--distributed-backend", "gloo"]
    common += ["--train-iters", str(iterations), "--global-batch-size", "7", "--pipeline-model-parallel-size", "2"]
    common += ["--attention-dropout", "0.1", "--hidden-dropout", "0.1"]
    for kind, te in _KINDS.items():
        if te and not jobs.te_here(setting):
            continue
        flags = [*common, *jobs.kernel_flags(setting, te=te), *(["--bf16"] if te else [])]
        for name in _FEW[2:] if setting.on_cpu else _FEW:
            made = plan(Request(name, 2, 7))
            with TemporaryDirectory(prefix="recompute-") as folder:
                files = [Path(folder, "plain.csv"), Path(folder, "recompute.csv")]
                for path, schedule in zip(files, (made, _with_recompute(made)), strict=True):
                    path.write_text(to_csv(schedule))
                plain, repeated, ours = (
                    jobs.train(2, jobs.Job((*flags, "--pipeline-schedule", str(path)), exact=True), shared=True)
                    for path in (files[0], *files)
                )
            found = compared(ours, plain, iterations, BF16 if te else FP32, to_the_bit=same_bits(plain, repeated))
            yield {"schedule": name, "layers": kind} | found


def _with_recompute(schedule: Schedule) -> Schedule:
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


def no_waits(setting: Setting) -> Iterator[Row]:
    """Runs torch's own check round each pass, with local layers and with Transformer Engine's."""
    from tools.gpu_tests import jobs
    from tools.gpu_tests.watchers import NoWaits

    flags = [*jobs.size_flags(setting, 8, usual=False), "--distributed-backend", "gloo", "--train-iters", "4"]
    flags += ["--global-batch-size", "4", "--pipeline-model-parallel-size", "2", "--timing-log-level", "2"]
    for schedule in _FEW[1:] if setting.on_cpu else (*_FEW, "interleaved-1f1b", "v-min", "v-zb"):
        for kind, te in _KINDS.items():
            if te and not jobs.te_here(setting):
                continue
            row: Row = {"schedule": schedule, "layers": kind}
            numbers = ["--bf16"] if te else []
            asked = [*flags, *jobs.kernel_flags(setting, te=te), *numbers, *jobs.schedule_flags(schedule)]
            try:
                ran = jobs.train(2, jobs.Job(tuple(asked), NoWaits), shared=True)
            except RankError as error:
                yield row | {FAULT: fault_of(error)}
            else:
                waits = sorted({wait for found in ran.found for wait in found})
                yield row | {"iterations": len(ran.losses), FAULT: waits[0] if waits else ""}


def memory_as_planned(setting: Setting) -> Iterator[Row]:
    """Yields the benchmark's rows."""
    for found in memory.measure(True, lambda text: print(text, flush=True)):
        worst = max(range(len(found["measured_bytes"])), key=found["measured_bytes"].__getitem__)
        off = found["worst_error"]
        yield {
            "schedule": found["schedule"] if "schedule" in found else memory_saving.named(found),
            "ranks": found["pipeline_size"],
            "worst rank, MiB": found["measured_bytes"][worst] / 2**20,
            "planned, MiB": found["planned_bytes"][worst] / 2**20,
            "worst error of a rank, %": 100 * off,
            FAULT: "" if abs(off) <= memory.MOST_ERROR else f"{100 * off:+.1f} % off the plan",
        }


def reuse(setting: Setting) -> Iterator[Row]:
    """Frees memory that a stream, busy for long, is recorded to use, and allocates as much."""
    if setting.on_cpu:
        raise Skipped("a CPU has no streams")
    import torch

    from megatron.schedules.runtime.transport import disowned

    side = torch.cuda.Stream()
    for owner in (True, False):
        memory = torch.empty(2**24, device="cuda")
        address = memory.data_ptr()
        with torch.cuda.stream(side):
            torch.cuda._sleep(2 * 10**9)
        (memory if owner else disowned(memory)).record_stream(side)
        del memory
        again = torch.empty(2**24, device="cuda").data_ptr() == address
        torch.cuda.synchronize()
        fault = "" if again != owner else f"reused {'before' if again else 'only when'} the stream was done"
        yield {"with its owner": owner, "reused at once": again, FAULT: fault}


def ranges(setting: Setting) -> Iterator[Row]:
    """Runs a real job under torch's profiler; on a GPU the profile must have kernels too."""
    from tools.gpu_tests import jobs
    from tools.gpu_tests.watchers import Profiled

    flags = [*jobs.size_flags(setting, 8, usual=False), *jobs.kernel_flags(setting), "--distributed-backend", "gloo"]
    flags += ["--train-iters", "3", "--global-batch-size", "4", "--pipeline-model-parallel-size", "2"]
    # Stock's own profiling, which brings the names, is to begin after the end.
    flags += ["--profile", "--profile-step-start", "1000", "--profile-step-end", "1001"]
    for schedule in _FEW[2:] if setting.on_cpu else _FEW:
        ran = jobs.train(2, jobs.Job((*flags, *jobs.schedule_flags(schedule)), Profiled), shared=True)
        for rank, names in enumerate(ran.found):
            yield {"schedule": schedule, "rank": rank} | names_row(names, setting.on_cpu)


def names_row(names: Any, on_cpu: bool) -> Row:
    """Returns how many of the program's actions the profile names, each once and in order."""
    fault = ""
    if names.seen != names.wanted:
        lacking = [name for name in names.wanted if name not in names.seen]
        fault = f"the profile has no {lacking[0]}" if lacking else "names come in another order, or more than once"
    elif not on_cpu and not names.kernels:
        fault = "the profile has no kernel of the GPU"
    return {"actions": len(names.wanted), "named": len(names.seen), "kernels": names.kernels, FAULT: fault}
