"""The grid search's command line, and a setting that it found run for real."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron.schedules.cli.ending import run
from megatron.schedules.estimate.device_memory import RankMemory
from megatron.schedules.estimate.devices import DEVICES, GIB
from megatron.schedules.estimate.models import Model
from tools import _answers, _run_settings, grid_search
from tools._answers import Answer, answers
from tools._grid import Found
from tools._iteration import Estimate, Outcome, estimate
from tools._job_specs import GRAPHS
from tools._methods import METHODS, SAVING, Method
from tools._question import Question
from tools._setting import Setting
from tools._start import of_model

SMALL = ["--model", "9.6B", "--gpus", "8", "--batch-size", "16", "--method", "1F1B", "--method", "v-half"]


def said(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    assert run(grid_search.main, "grid_search", [*arguments, "--jobs", "1"], flags=grid_search.FLAGS) == status
    found = capsys.readouterr()
    return found.err if status else found.out


def test_a_table_for_each_batch_size_with_a_row_for_each_method(capsys: pytest.CaptureFixture[str]):
    text = said(capsys, *SMALL, "--batch-size", "32")
    assert text.count("9.6B on 8 A100-80GB, sequence length 1024, batch size") == 2
    assert text.count("\nV-Half ") == text.count("\n1F1B ") == 2
    assert said(capsys, *SMALL, "--format", "markdown").count("\n| V-Half | ") == 1


def test_csv_has_the_fastest_settings_first_and_what_sets_them(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    said(capsys, *SMALL, "--top", "3", "--format", "csv", "--output", str(tmp_path / "found.csv"))
    rows = list(csv.DictReader(io.StringIO((tmp_path / "found.csv").read_text())))
    assert len(rows) == 6
    shares = [float(row["mfu"]) for row in rows]
    assert shares == sorted(shares, reverse=True)
    for row in rows:
        assert int(row["data"]) * int(row["tensor"]) * int(row["pipeline"]) == 8
        for flag, column in (("--tensor-model-parallel-size", "tensor"), ("--micro-batch-size", "micro_batch_size")):
            assert f"{flag} {row[column]} " in row["flags"]
        # Stock does without our flags.
        assert ("--pipeline-schedule v-half" in row["flags"]) == (row["method"] == "V-Half")


def test_savings_are_searched_with_their_flag(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    asked = []

    def searched(pool: object, tasks: Sequence[tuple[Question, Method]], *others: object) -> list[Found]:
        asked.extend((method.name, at.device.host_link, at.device.host_memory) for at, method in tasks)
        return [found(*task) for task in tasks]

    def found(question: Question, method: Method) -> Found:
        rank = RankMemory(2e10, 2e10, 2e10, 1e10, host=3 * GIB / question.device.node)
        sizes = Setting(method, question.model, question.device, 1, 1, 8, 1, 16)
        outcome = Outcome(1.0, 0.1, (rank,), 0.2, 0.25, (0.0, 0.0), (4,) * 16, 1 / 16)
        return Found(method, [Estimate(sizes, 1.0, 0.5, outcome)])

    monkeypatch.setattr(grid_search, "worker_pool", ThreadPoolExecutor)
    monkeypatch.setattr(_answers, "search_all", searched)
    monkeypatch.setattr(_answers, "answered", lambda start, found, *_: Answer(start, found))
    text = said(capsys, *SMALL, "--format", "markdown")
    assert {name for name, _, _ in asked} == {"1F1B", "V-Half"} and "recomputed" not in text
    asked.clear()
    flags = "--save-memory", "--offload-gbps", "40", "--host-memory", "1000"
    text = said(capsys, *SMALL, *flags, "--format", "markdown")
    assert set(asked[2:]) == {(method.name, 40e9, 1000 * GIB) for method in SAVING}
    assert "| recomputed of computing | host GiB |" in text
    assert text.count("| 25.0 % | 3 |") == 5


RECIPE_LINES = [
    (["--recipe", "llama"], "--bridge is missing: the unpacked wheel of megatron-bridge, which has it"),
    (["--recipe", "llama", "--bridge", "none"], "none has no megatron/bridge/perf_recipes"),
    (["--model", "9.6B", "--batch-size", "8"], "--gpus is missing: a model does not say it"),
    (["--model", "9.6B", "--gpus", "8"], "--batch-size is missing: a model does not say it"),
]


@pytest.mark.parametrize(("flags", "why"), RECIPE_LINES)
def test_what_a_recipe_or_a_model_lacks_is_said_in_a_line(
    flags: list[str], why: str, capsys: pytest.CaptureFixture[str]
):
    error = said(capsys, *flags, status=2)
    assert why in error
    assert error.count("\n") == 1


def test_a_script_has_its_own_setting_and_stock_counts_it(tmp_path: Path):
    script = tmp_path / "train.sh"
    script.write_text(
        f"{LLAMA} --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 4 --fp8-format e4m3"
    )
    start = of_model(str(script), DEVICES["H100-80GB"], 16, 32)
    own = start.question.own
    assert own is not None
    assert (own.tensor, own.pipeline, own.data, own.method.chunks, own.layers) == (2, 4, 2, 4, (2,) * 16)
    with ThreadPoolExecutor(1) as pool:
        (answer,) = answers(pool, [start], [])
    assert answer.own is not None and answer.stock is answer.own and answer.ours is None
    # The peak is that of FP8.
    flops = answer.own.mfu * answer.own.seconds * 16 * DEVICES["H100-80GB"].fp8_flops
    assert flops == pytest.approx(own.model.flops_a_token * 8192 * 32)
    assert of_model(str(script), DEVICES["H100-80GB"], 12, 32).question.own is None


def test_a_captured_iteration_stays_captured_under_our_schedules(tmp_path: Path):
    script = tmp_path / "train.sh"
    experts = "--num-experts 8 --moe-ffn-hidden-size 4096 --cuda-graph-impl full_iteration"
    script.write_text(f"{LLAMA} --pipeline-model-parallel-size 4 {experts}")
    question = of_model(str(script), DEVICES["GB200"], 16, 32).question
    sizes = question.model, question.device, 4, 1, 4, 1, 32
    ours = METHODS[0]._replace(is_stock=False)
    stock, kept, lost = (
        estimate(Setting(method, *sizes, lost=lost)).seconds
        for method, lost in ((METHODS[0], question.lost), (ours, question.lost), (ours, frozenset({GRAPHS})))
    )
    # The host's time for experts' layers is what a lost graph costs.
    assert kept < 1.02 * stock < lost


@pytest.mark.parametrize(("own", "tried"), [(1, {1}), (4, {1, 4})])
def test_models_with_experts_are_tried_with_no_more_tokens_than_were_measured(
    tmp_path: Path, own: int, tried: set[int]
):
    script, device = tmp_path / "train.sh", DEVICES["GB200"]
    sizes = f"--pipeline-model-parallel-size 4 --micro-batch-size {own}"
    found = []
    for experts in ("", "--num-experts 8 --moe-ffn-hidden-size 4096"):
        script.write_text(f"{LLAMA} {sizes} {experts}")
        stages = of_model(str(script), device, 16, 32).question.stages(METHODS[0])
        found.append({each.setting.micro_batch for each in stages})
    assert found == [{1, 2, 4, 8, 16}, tried]


LLAMA = """
TP=2
MODEL_ARGS=(--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192 --ffn-hidden-size 14336
  --group-query-attention --num-query-groups 8 --swiglu --disable-bias-linear --normalization RMSNorm
  --position-embedding-type rope --vocab-size 128256 --untie-embeddings-and-output-weights --cross-entropy-loss-fusion)
torchrun pretrain_gpt.py ${MODEL_ARGS[@]} --bf16 --tensor-model-parallel-size $TP --attention-dropout ${DROPOUT:-0} \
  --hidden-dropout 0 --max-position-embeddings 8192
"""


def test_any_script_with_megatrons_flags_is_searched_as_the_model_it_describes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    script = tmp_path / "llama.sh"
    script.write_text(LLAMA)
    size = ["--gpus", "4", "--batch-size", "16", "--method", "v-half", "--format", "csv"]
    named, written = (said(capsys, "--model", model, *size) for model in ("Llama-3-8B", str(script)))
    assert named == written
    assert "--pipeline-schedule v-half --pipeline-layers " in written


def test_what_does_not_fit_is_told_with_the_part_that_is_too_large_and_what_would_help(
    capsys: pytest.CaptureFixture[str],
):
    text = said(capsys, *SMALL, "--memory", "9", "--sequence-length", "8192")
    (line,) = [line for line in text.splitlines() if line.startswith("1F1B: ")]
    assert re.search(
        r"needs least with DP \d, TP \d, PP \d, micro batch 1; there rank \d holds (at least )?[\d.]+ GiB of 8.1 GiB "
        r"\(weights [\d.]+, gradients [\d.]+, optimizer [\d.]+, activations [\d.]+, messages [\d.]+\), most of it "
        r"\w+; (16|32|64|128) GPUs do",
        line,
    )


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--model", "9.7B"], "--model: '9.7B' is neither a model known by name nor a file: did you mean 9.6B?"),
        (["--costs-file", "none.json"], "cannot read none.json"),
        (["--validate", "--gpus", "4096"], "--validate runs on 4096 GPUs of this machine, which has 8"),
        (["--output", "/dev/null/found.csv"], "cannot write /dev/null/found.csv"),
        (["--output", "none/found.csv"], "cannot write none/found.csv: there is no folder none"),
        (["--output", "."], "cannot write .: Is a directory"),
        (["--recipe", "llama"], "give --model or --recipe, one of them"),
        (["--gpus", "1"], "'--gpus'"),
        (["--gpus", "9" * 20], "'--gpus'"),
        (["--sequence-length", "9" * 20], "'--sequence-length'"),
        (["--batch-size", "100001"], "'--batch-size'"),
        (["--device", "A100"], "'--device'"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    flags: list[str], why: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(grid_search, "gpus_here", lambda: 8)
    error = said(capsys, *SMALL, *flags, status=2)
    assert why in error
    assert error.startswith("grid_search: ")
    assert error.count("\n") == 1


@pytest.mark.nightly
def test_a_setting_runs_through_the_main_program(tmp_path: Path):
    sizes = "--num-layers 6 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 96"
    model = Model("tiny", f"{sizes} --untie-embeddings-and-output-weights")
    setting = Setting(METHODS[4], model, DEVICES["A100-80GB"], 1, 1, 2, 1, 4)
    cpu = "--distributed-backend gloo --transformer-impl local --no-gradient-accumulation-fusion --num-workers 0"
    fusions = "--no-masked-softmax-fusion --no-bias-dropout-fusion --no-persist-layer-norm"
    found = _run_settings.run_setting(estimate(setting), tmp_path, [*cpu.split(), *fusions.split()])
    assert found.status == "done", (tmp_path / "job.out").read_text()
    assert found.seconds is not None
    assert found.seconds > 0
