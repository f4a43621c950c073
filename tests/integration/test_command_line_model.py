"""The command line's ``--model`` and a job's dry run: one model, the same figures."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron.schedules.cli.commands import main
from megatron.schedules.estimate.models import MODELS
from megatron.schedules.integration.flags.declared import stock_parser
from megatron.schedules.job.plan_summary import summary
from tests.integration.dry_runs import job_of

FULL = "--recompute-granularity full --recompute-method"
EXPERTS = """--num-layers 16 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --vocab-size 50000 --swiglu
    --max-position-embeddings 2048 --num-experts 8 --moe-layer-freq 2 --expert-model-parallel-size 2 --bf16
    --use-distributed-optimizer --global-batch-size 16"""
# Flags of a model; the schedule, and flags of the command line with those of a job that mean the same.
CASES = {
    "a GPT": (MODELS["9.6B"].flags + " --num-layers 32", "1f1b", "", ""),
    "tensor and sequence parallel": (
        f"{MODELS['Llama-3-8B'].flags} --tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 2",
        "v-half",
        "",
        "",
    ),
    "full recompute": (f"{MODELS['Llama-3-8B'].flags} {FULL} uniform --recompute-num-layers 2", "zb-1p", "", ""),
    "full recompute of a layer a stage": (
        f"{MODELS['Llama-3-8B'].flags} {FULL} block --recompute-num-layers 1",
        "v-zb",
        "",
        "",
    ),
    "selective recompute, scores kept": (
        f"{MODELS['Llama-3-70B'].flags} --transformer-impl local --recompute-granularity selective",
        "v-min",
        "",
        "",
    ),
    "experts, expert parallel": (EXPERTS, "v-zb", "", ""),
    "experts' messages behind weight gradients": (f"{EXPERTS} --overlap-moe-expert-parallel-comm", "v-zb", "", ""),
    "FP8 between ends in bf16": (
        f"{MODELS['Llama-3-8B'].flags} --fp8-format hybrid --fp8-recipe blockwise --first-last-layers-bf16",
        "zb-1p",
        "",
        "",
    ),
    "a vocabulary that all ranks share": (
        MODELS["Llama-3-8B"].flags,
        "v-half",
        "--vocabulary-parallel",
        "--pipeline-vocabulary-parallel",
    ),
}


@pytest.mark.job
@pytest.mark.parametrize(("flags", "schedule", "ours", "jobs"), CASES.values(), ids=CASES)
def test_the_command_line_says_of_a_model_what_a_dry_run_says(
    flags: str, schedule: str, ours: str, jobs: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "model.sh"
    file.write_text(flags)
    size = ["--pipeline-size", "4", "--microbatches", "8", "--model", str(file), *ours.split(), "--format", "json"]
    assert main(["plan", "--schedule", schedule, *size]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert main(["compare", "--schedule", schedule, "--device-memory", "80GiB", *size]) == 0
    (row,) = json.loads(capsys.readouterr().out)

    job = shlex.split(f"{flags} {jobs} --pipeline-model-parallel-size 4 --pipeline-schedule {schedule}")
    args, _ = stock_parser().parse_known_args(job)
    args.micro_batch_size = args.micro_batch_size or 1
    data = (args.global_batch_size or 8) // 8
    args.global_batch_size = 8 * args.micro_batch_size * data
    args.world_size = 4 * args.tensor_model_parallel_size * data
    monkeypatch.setattr("megatron.schedules.job.plan_job.refusal", lambda *_: "")
    asked = job_of(args)
    timeline = asked.plan.timeline
    assert plan["figures"]["peak_memory_by_rank"] == pytest.approx(list(timeline.peaks))
    assert plan["figures"]["makespan"] == pytest.approx(timeline.makespan)
    hidden, exposed = timeline.messages
    assert (row.get("hidden", 0.0), row.get("exposed", 0.0)) == pytest.approx((hidden, exposed))
    assert (hidden > 0) == ("overlap-moe" in flags) == ("behind weight gradients" in summary(asked))
    assert tuple(plan["layers"]) == asked.request.layers_on(asked.schedule.placement)
    for part, held in asked.memory[asked.worst].parts.items():
        assert row[f"{part}_bytes"] == pytest.approx(held), part
    assert row["fits"] == asked.fits(80 * 2**30)
