"""Of random jobs the dry run, the command line, Python and the grid search say the same."""

from __future__ import annotations

import json
import shlex
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron.schedules as ms
from megatron.schedules.cli.commands import main
from megatron.schedules.estimate.devices import DEVICES, GIB
from megatron.schedules.estimate.models import find_model
from megatron.schedules.integration.machine import machine_of
from megatron.schedules.job.plan_job import JobPlan, plan_job
from megatron.schedules.planner.registry import AUTO, NAMES
from megatron.schedules.utils.errors import PlanError
from tests.integration.dry_runs import planned, short_searches
from tools._iteration import Setting, estimate
from tools._methods import ADAPTIVE, METHODS, SAVING
from tools._pasted import flags

pytestmark = pytest.mark.nightly

# Each takes seconds.
EXAMPLES = 6
MORE = [ADAPTIVE, SAVING[0]]
SCHEDULES = [name for name in NAMES if name not in ("file", "adaptive")]
RECOMPUTE = [
    "",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--recompute-granularity selective --recompute-modules mlp",
]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file for the model's flags, which hypothesis writes anew for each job."""
    return tmp_path_factory.mktemp("models") / "model.sh"


@st.composite
def models(draw: Any) -> str:
    """Flags of a model whose layers divide by 16 stages, and of its training."""
    hidden = draw(st.sampled_from([1024, 2048, 4096]))
    words = [
        f"--num-layers {draw(st.sampled_from([16, 32, 48]))} --hidden-size {hidden}",
        f"--num-attention-heads {hidden // 128} --seq-length 4096 --max-position-embeddings 4096",
        f"--vocab-size {draw(st.sampled_from([8000, 32000, 128256]))} --untie-embeddings-and-output-weights",
        draw(st.sampled_from(["--swiglu --disable-bias-linear --normalization RMSNorm", ""])),
        draw(st.sampled_from(["--position-embedding-type rope", ""])),
        "--bf16 --transformer-impl transformer_engine --use-distributed-optimizer",
    ]
    return " ".join(word for word in words if word)


def of_dry_run(flags: str) -> JobPlan | None:
    """The plan of a dry run; None if the job is refused."""
    try:
        return planned(shlex.split(flags))
    except PlanError:
        return None


@given(data=st.data())
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
def test_the_dry_run_the_command_line_and_python_give_one_verdict(file: Path, data: st.DataObject) -> None:
    model = f"{data.draw(models())} {data.draw(st.sampled_from(RECOMPUTE))} --micro-batch-size 1"
    ranks, share = data.draw(st.sampled_from([2, 4])), data.draw(st.sampled_from([1, 2]))
    microbatches, gib = share * ranks, data.draw(st.sampled_from([6, 12, 24, 48, 80]))
    names = data.draw(st.lists(st.sampled_from(SCHEDULES), min_size=1, max_size=3, unique=True))
    size = f"--pipeline-model-parallel-size {ranks} --global-batch-size {microbatches} --micro-batch-size 1"
    with short_searches():
        jobs = {
            name: of_dry_run(f"{model} {size} --pipeline-schedule {name} --pipeline-dry-run {ranks}x{gib}GiB")
            for name in [*names, AUTO]
        }
        file.write_text(f"{model} --global-batch-size {microbatches}")
        rows = compared([*names, AUTO], file, ranks, microbatches, gib)
        for name, job in jobs.items():
            row = rows[name]
            assert (job is None) == ("reason" in row), (name, row)
            if job is None:
                continue
            worst = job.memory[job.worst]
            assert (row["bubble"], row["together_bytes"]) == (job.plan.bubble, worst.device), name
            assert row["fits"] == job.fits(gib * GIB), name
            if name != AUTO:  # which has no device in Python
                plan = ms.plan(name, pipeline_size=ranks, microbatches=microbatches, model=file)
                assert (plan.schedule.order, plan.bubble) == (job.schedule.order, job.plan.bubble), name
    assert rows[AUTO]["fits"] or not any(row.get("fits") for row in rows.values())


def compared(names: list[str], model: Path, ranks: int, microbatches: int, gib: int) -> dict[str, dict[str, Any]]:
    """The command line's rows, by schedule."""
    words = f"--pipeline-size {ranks} --microbatches {microbatches} --model {model} --device-memory {gib}GiB"
    several = [word for name in names for word in ("--schedule", name)]
    text = StringIO()
    with redirect_stdout(text), redirect_stderr(StringIO()):
        assert main(["compare", *words.split(), *several, "--format", "json"]) == 0
    return {row["schedule"]: row for row in json.loads(text.getvalue())}


@given(data=st.data())
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
def test_the_grid_searchs_estimate_is_a_dry_run_of_the_flags_that_it_prints(file: Path, data: st.DataObject) -> None:
    """The same verdict, schedule, layers and bytes; and the same bubble for the same times of passes."""
    file.write_text(data.draw(models()))
    model = find_model(str(file))
    pipeline = data.draw(st.sampled_from([2, 4, 8]))
    of_device = replace(DEVICES["A100-80GB"], memory=data.draw(st.sampled_from([8, 16, 40, 80])) * GIB)
    setting = Setting(
        data.draw(st.sampled_from([method._replace(chunks=method.chunks or 2) for method in METHODS] + MORE)),
        model,
        of_device,
        data=data.draw(st.sampled_from([1, 2])),
        tensor=data.draw(st.sampled_from([1, 2])),
        pipeline=pipeline,
        micro_batch=data.draw(st.sampled_from([1, 2])),
        global_batch=8 * pipeline,
    )
    if data.draw(st.booleans()) and not setting.method.is_searched:
        setting = replace(setting, method=setting.method.sharing())
    dry_run = f"--pipeline-dry-run {setting.gpus}x{of_device.memory / GIB:g}GiB"
    with short_searches():
        try:
            found = estimate(setting, search_seconds=0.02)
        except PlanError:
            assert setting.method.is_searched  # which has no memory left
            return
        ours = f"--pipeline-schedule {setting.choice.text}" if setting.method.is_stock else ""
        job = planned(shlex.split(f"{model.flags} {flags(found)} {ours} {dry_run}"))
        exact = replace(job.spec, times=setting.spec.times, settings=replace(job.spec.settings, costs=None))
        timed = plan_job(exact, machine_of(exact))
    assert timed.plan.bubble == found.bubble
    assert timed.memory == found.ranks
    assert timed.layers == found.outcome.layers
    assert timed.fits(of_device.memory) == found.fits
    if not setting.method.is_searched:
        assert job.fits(of_device.memory) == found.fits
        assert max(rank.device for rank in job.memory) == pytest.approx(found.memory, rel=0.01)


@given(data=st.data())
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
def test_the_smallest_limit_that_an_error_names_works(data: st.DataObject) -> None:
    ranks = data.draw(st.sampled_from([2, 4]))
    schedule = data.draw(st.sampled_from(["auto", "auto:3", "adaptive", "adaptive:2"]))
    asked = (
        f"{data.draw(models())} {data.draw(st.sampled_from(RECOMPUTE))} --micro-batch-size 1 "
        f"--pipeline-model-parallel-size {ranks} --global-batch-size {2 * ranks} --pipeline-dry-run {ranks} "
        f"--pipeline-schedule {schedule} --pipeline-memory-limit"
    )
    with short_searches():
        with pytest.raises(PlanError, match="is the smallest that works") as refused:
            planned(shlex.split(f"{asked} 0.02GiB"))
        named = str(refused.value).removesuffix("GiB is the smallest that works").split()[-1]
        job = planned(shlex.split(f"{asked} {named}GiB"))
    assert max(rank.activations + rank.messages for rank in job.memory) <= float(named) * GIB
