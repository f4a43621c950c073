"""The command line, Python, a dry run and training make the same plan of the same job."""

from __future__ import annotations

import json
import os
import shlex
from itertools import product
from pathlib import Path

import pytest

import megatron.schedules as ms
from megatron.schedules.cli.commands import main
from megatron.schedules.integration.flags.declared import stock_parser
from megatron.schedules.job.flags import SEARCH_VARIABLE
from megatron.schedules.job.plan_job import JobPlan
from megatron.schedules.schedule.text_forms import from_csv, to_csv
from tests.integration.dry_runs import job_of, short_searches
from tests.tiers import by_night, some_by_night

LLAMA = """--num-layers 16 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 14336 --swiglu
    --group-query-attention --num-query-groups 8 --disable-bias-linear --normalization RMSNorm --seq-length 4096
    --max-position-embeddings 4096 --position-embedding-type rope --vocab-size 128256 --attention-dropout 0
    --hidden-dropout 0 --untie-embeddings-and-output-weights --bf16 --transformer-impl local --micro-batch-size 1"""
MODELS = {
    "plain": LLAMA,
    "full recompute": f"{LLAMA} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "selective recompute": f"{LLAMA} --recompute-granularity selective --recompute-modules mlp",
}
RANKS = (2, 4)
LIMITS = ("0.7", "20GiB")
MICROBATCHES = 8
SETTINGS = some_by_night(
    product(MODELS, RANKS, LIMITS, ("auto", "adaptive")),
    lambda model, ranks, limit, schedule: ranks == 2 or model == "selective recompute",
)


def in_a_job(model: str, ranks: int, limit: str, schedule: str, *more: str) -> JobPlan:
    """The plan of a job with Megatron's flags."""
    sizes = f"--pipeline-model-parallel-size {ranks} --global-batch-size {MICROBATCHES} --train-iters 1"
    ours = ["--pipeline-schedule", schedule, "--pipeline-memory-limit", limit, *more]
    args, _ = stock_parser().parse_known_args([*shlex.split(model), *sizes.split(), *ours])
    args.world_size = ranks
    return job_of(args)


@pytest.mark.parametrize(("model", "ranks", "limit", "schedule"), SETTINGS)
def test_all_front_doors_make_one_plan(
    model: str, ranks: int, limit: str, schedule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = MODELS[model]
    file = tmp_path / "model.sh"
    file.write_text(flags)
    with short_searches():
        dry = in_a_job(flags, ranks, limit, schedule, "--pipeline-dry-run", str(ranks))
        training = in_a_job(flags, ranks, limit, schedule)
        arguments = {"pipeline_size": ranks, "microbatches": MICROBATCHES, "model": file, "memory_limit": limit}
        in_python = ms.plan(schedule, search_seconds=float(os.environ[SEARCH_VARIABLE]), **arguments)
        capsys.readouterr()
        words = f"--pipeline-size {ranks} --microbatches {MICROBATCHES} --model {file} --memory-limit {limit}"
        assert main(["plan", "--schedule", schedule, *words.split(), "--format", "json"]) == 0
    assert training.plan == dry.plan
    assert (in_python.schedule.order, in_python.decisions) == (dry.schedule.order, dry.plan.decisions)
    printed = json.loads(capsys.readouterr().out)
    assert tuple(printed["layers"]) == dry.request.layers_on(dry.schedule.placement)
    assert printed["figures"]["makespan"] == dry.plan.iteration_time
    assert from_csv(to_csv(dry.schedule)).order == from_csv(in_python.to_csv()).order


def in_a_dry_run(model: str, schedule: str, gib: int) -> JobPlan:
    """The plan of a dry run on four ranks with devices of this size."""
    flags = f"--pipeline-model-parallel-size 4 --global-batch-size {MICROBATCHES} --pipeline-schedule {schedule}"
    args, _ = stock_parser().parse_known_args(shlex.split(f"{model} {flags} --pipeline-dry-run 4x{gib}GiB"))
    return job_of(args)


@pytest.mark.parametrize(
    ("model", "gib"), [("full recompute", 88), ("full recompute", 60), ("plain", 80)], ids=["full", "less", "plain"]
)
def test_a_comparison_and_a_dry_run_give_one_verdict(
    model: str, gib: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same schedule, bubble, bytes, and whether they fit; and auto fits wherever one of the others does."""
    file, names = tmp_path / "model.sh", ("auto", "v-half", "v-min", "1f1b")
    file.write_text(MODELS[model])
    with short_searches():
        dry = {name: in_a_dry_run(MODELS[model], name, gib) for name in names}
        capsys.readouterr()
        words = f"--pipeline-size 4 --microbatches {MICROBATCHES} --model {file} --device-memory {gib}GiB"
        several = [word for name in names for word in ("--schedule", name)]
        assert main(["compare", *words.split(), *several, "--format", "json"]) == 0
    rows = {row["schedule"]: row for row in json.loads(capsys.readouterr().out)}
    for name, job in dry.items():
        row = rows[name]
        assert (row["bubble"], row["together_bytes"]) == (job.plan.bubble, job.memory[job.worst].device), name
        assert row["fits"] == job.fits(gib * 2**30), name
    assert rows["auto"]["fits"] or not any(row["fits"] for row in rows.values())


@pytest.mark.parametrize("model", ["full recompute", by_night("selective recompute")])
def test_auto_recomputes_only_what_the_memory_needs(model: str) -> None:
    """Megatron's own recompute in the flags says that memory was short, which the plan judges anew."""
    with short_searches():
        plenty, scarce = (in_a_job(MODELS[model], 4, limit, "auto") for limit in ("2.0", "0.35"))
        obeyed = in_a_job(f"{MODELS[model]} --pipeline-layers auto", 4, "2.0", "adaptive")
    assert plenty.spec.recompute.granularity is None and not any(plenty.plan.decisions.mean_savings.values())
    assert f"recompute left out (--recompute-granularity {model.split()[0]}): " in plenty.left_out
    assert obeyed.spec.recompute.granularity == model.split()[0] and not obeyed.left_out
    assert plenty.plan.iteration_time < obeyed.plan.iteration_time
    assert scarce.plan.peak_memory <= 0.35 * (1 + 1e-9)
