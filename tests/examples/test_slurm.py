"""examples/slurm: the scripts as they are, under stand-ins for SLURM's commands, with torchrun and real training."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.examples import standin_slurm
from tests.examples.tiny_job import (
    CPU,
    ROOT,
    SLURM,
    candidates,
    iterations,
    make_text,
    prepare,
    prepare_sweep,
    run,
    set_all,
)
from tools import collect_sweep

MODELS = sorted((SLURM / "models").glob("*.sh"))

Submit = Callable[..., str]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix of a small byte-level data set."""
    return make_text(tmp_path_factory.mktemp("text"))


@pytest.fixture
def cluster(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """SLURM's commands on the PATH, and a model for this machine in the environment; the folder of all of it."""
    standin_slurm.install(tmp_path / "bin")
    (tmp_path / "state").mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    prepare(tmp_path, text, monkeypatch)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    set_all(monkeypatch, PATH=path, STANDIN_STATE=tmp_path / "state", MASTER_PORT=port)
    return tmp_path


@pytest.fixture
def submit(cluster: Path) -> Submit:
    """Runs a job to its end, requeued or not, and returns its output."""

    def sbatch(*arguments: object) -> str:
        done = run("sbatch", f"--output={cluster / 'job.out'}", *arguments)
        assert done.returncode == 0, done.stderr
        return (cluster / "job.out").read_text()

    return sbatch


@pytest.mark.nightly
def test_a_warned_job_saves_is_queued_again_and_goes_on(
    cluster: Path, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUS_PER_NODE", "2")
    monkeypatch.setenv("TRAIN_ITERS", "40")
    monkeypatch.setenv("EXTRA_FLAGS", f"{CPU} --num-workers 1")  # a signal must not end the data loader either
    monkeypatch.setenv("STANDIN_WARN_AT", "iteration        3/")
    output = submit(SLURM / "one_node.sbatch", cluster / "tiny.sh")
    assert output.count("stand-in: job") == 2, output[-4000:]
    first, second = output.split("queued again")
    saved = int(re.search(r"ended with status 0 at iteration (\d+) of 40: $", first)[1])
    assert 3 <= saved < 40
    assert iterations(first) == list(range(1, saved + 1))
    assert f"from iteration {saved} of 40" in second
    assert iterations(second) == list(range(saved + 1, 41))
    assert "done: 40 iterations" in second
    for restart in (0, 1):  # a log for each rank of each start
        logs = list((cluster / "run" / "logs" / f"100-{restart}" / "node-0").rglob("stdout.log"))
        assert sorted(log.parent.name for log in logs) == ["0", "1"]


@pytest.mark.nightly
def test_nodes_meet_in_the_order_of_slurm(cluster: Path, submit: Submit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUS_PER_NODE", "1")
    monkeypatch.setenv("TRAIN_ITERS", "2")
    monkeypatch.setenv("SCHEDULE", "")  # Megatron's own
    monkeypatch.setenv("RECOMPUTE", "none")
    monkeypatch.setenv("EXTRA_FLAGS", f"{CPU} --num-workers 0 --ckpt-format torch")  # the quickest to write
    output = submit("--nodes=2", SLURM / "many_nodes.sbatch", cluster / "tiny.sh")
    assert iterations(output) == [1, 2], output[-4000:]
    assert output.count("stand-in: job 100 ended with status 0") == 1
    for node in (0, 1):
        (log,) = (cluster / "run" / "logs" / "100-0" / f"node-{node}").rglob("stdout.log")
        assert f"[Rank {node}]" in log.read_text()


@pytest.mark.nightly
def test_a_job_that_fails_for_good_is_not_queued_again(
    cluster: Path, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUS_PER_NODE", "2")
    monkeypatch.setenv("PYTHON", "false")
    output = submit(SLURM / "one_node.sbatch", cluster / "tiny.sh")
    assert "failed with status 1 and nothing saved since iteration 0: not queued again" in output
    assert output.count("stand-in: job 100 ended with status 1") == output.count("stand-in: job") == 1


@pytest.mark.nightly
def test_a_job_that_is_warned_before_it_saves_tries_three_times(
    cluster: Path, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preempted is not failed; but a time limit that is too short for one checkpoint would go on for ever."""
    slow = cluster / "slow"
    slow.write_text("#!/bin/sh\nsleep 1\n")
    slow.chmod(0o755)
    monkeypatch.setenv("GPUS_PER_NODE", "2")
    monkeypatch.setenv("PYTHON", str(slow))
    monkeypatch.setenv("STANDIN_WARN_AT", "a log for each")
    output = submit(SLURM / "one_node.sbatch", cluster / "tiny.sh")
    assert output.count("told to end: saving") == 3
    assert output.count("queued again") == 3
    assert output.count("stand-in: job") == 3
    assert "nothing saved since iteration 0: not queued again" in output


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("settings", "arguments", "said"),
    [
        ({}, ["models/30B.sh"], "no model file models/30B.sh; there are models/21B.sh"),
        ({"GPUS_PER_NODE": "3"}, [], "needs a multiple of 8 GPUs; 1 nodes with 3 each have 3"),
        ({"TRAIN_ITERS": "many"}, [], "TRAIN_ITERS=many is not a whole number from 1 to"),
        ({"RECOMPUTE": "some"}, [], "RECOMPUTE=some is none of none, selective and full"),
        ({"PYTHON": "/none/python"}, [], "no Python at /none/python: set PYTHON"),
        ({"REPOSITORY": "/"}, [], "run sbatch in the repository's root, or set REPOSITORY to it"),
    ],
)
def test_bad_settings_end_in_one_line(
    submit: Submit, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], arguments: list[str], said: str
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    lines = submit(SLURM / "one_node.sbatch", *arguments).splitlines()
    assert len(lines) == 2
    assert said in lines[0]
    assert lines[1] == "stand-in: job 100 ended with status 2"


CHECK = """
import json, os, sys
import megatron.schedules
megatron.schedules.without_gpu()
from megatron.training.arguments import parse_and_validate_args
from megatron.training.global_vars import unset_global_variables
megatron.schedules.install()
for ranks, flags in json.loads(sys.argv[1]):
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(ranks)}
    sys.argv = ["pretrain_gpt.py", *flags]
    args = parse_and_validate_args()
    print("LAYERS", args.num_layers, args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size)
    unset_global_variables()
"""
SETTINGS = """
source examples/slurm/job.sh
read_settings "$1"
printf '%s\\n' "$GPUS" "${MODEL_FLAGS[@]}" "${PARALLEL_FLAGS[@]}" "${SCHEDULE_FLAGS[@]}" "${BATCH_FLAGS[@]}" \\
  "${RECOMPUTE_FLAGS[@]}" "${TRAIN_FLAGS[@]}"
"""


@pytest.mark.nightly
def test_every_model_passes_every_check_under_stocks_schedule_and_ours() -> None:
    jobs, expected = [], []
    for model in MODELS:
        for schedule, chunks in (("", None), ("v-half", 2)):
            environment = os.environ | {"SCHEDULE": schedule, "PYTHON": sys.executable}
            made = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", SETTINGS, "-", str(model)],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                check=True,
            )
            gpus, *flags = made.stdout.splitlines()
            jobs.append((gpus, flags))
            expected.append(f"LAYERS {2 * int(gpus) - 2} {gpus} {chunks}")
    checked = run(sys.executable, "-W", "ignore", "-c", CHECK, json.dumps(jobs))
    assert re.findall(r"^LAYERS .*", checked.stdout, re.MULTILINE) == expected, checked.stderr[-2000:]


@pytest.mark.nightly  # its parts are tested below; the whole takes long
def test_a_sweep_runs_its_candidates_and_collects_the_table(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = prepare_sweep(cluster, monkeypatch)
    done = run("bash", SLURM / "sweep.sh", "tiny", "--partition=big")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"sweep.sh: 2 candidates in job 100; job 101 writes {sweep}/table.md\n"
    array, last = (shlex.split((cluster / "state" / f"job-{job}").read_text()) for job in (100, 101))
    assert {"--array=0-1", "--nodes=1", "--gpus-per-node=2", "--partition=big"} <= set(array)
    assert {"--dependency=afterany:100", "--partition=big"} <= set(last)
    with (sweep / "table.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [(row["candidate"], row["method"]) for row in rows] == [("1", "v-half"), ("0", "v-min")]
    assert rows[0]["outcome"] == "done", (sweep / "job-1.out").read_text()[-3000:]
    assert float(rows[0]["measured_seconds"]) > 0
    assert float(rows[0]["measured_mfu"]) == pytest.approx(0.5 * 2.0 / float(rows[0]["measured_seconds"]))
    assert rows[1]["measured_seconds"] == ""
    assert rows[1]["outcome"].startswith("failed: pretrain_gpt.py: error: --pipeline-schedule v-min has 4 stages")
    assert "| 1 | v-half | 1 x 1 x 2 x 1 | 2.00 |" in (sweep / "table.md").read_text()
    assert "v-half" in (sweep / "collect.out").read_text()
    assert "has 4 stages" in (sweep / "job-0.out").read_text()  # the first rank's errors are shown


LINE = (
    " [2026-01-02 03:04:05.678901] iteration        {}/       4 | consumed samples:           16 | elapsed time per "
    "iteration (ms): {} | learning rate: 3.000000E-04 | global batch size:    16 | lm loss: 5.600000E+00 |\n"
)


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A sweep whose candidates have ended in every way."""
    folder = tmp_path / "measured"
    candidates(folder, *["--pipeline-schedule v-half"] * 5, "--recompute-granularity 'full'")
    ranks = [folder / number / "node-0" / "100_x" / "attempt_0" / "1" for number in ("0", "1", "2", "3")]
    for rank in ranks:
        rank.mkdir(parents=True)
    times = "".join(LINE.format(number, ms) for number, ms in enumerate((9000.0, 5000.0, 2400.0, 2600.0), 1))
    peak = "[Rank 1] (after 2 iterations) memory (MB) | allocated: 2048.00 | max allocated: 32768.00 | reserved: 0.00\n"
    (ranks[0] / "stdout.log").write_text(times + peak + peak.replace("32768", "1024"))
    (ranks[1] / "stderr.log").write_text("[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")
    (ranks[2] / "stdout.log").write_text(LINE.format(1, 4000.0))
    (folder / "job-2.out").write_text(
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-02 DUE TO TIME LIMIT ***\n"
    )
    (ranks[3] / "stderr.log").write_text("Traceback\n[rank1]: RuntimeError: something | else\n")
    (folder / "job-4.out").write_text("candidate: error: no Python at x\n")
    return folder


def test_the_table_of_a_sweep(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert collect_sweep.main([str(measured), "--format", "markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]
    start = ["1 x 1 x 2 x 1", "2.00"]
    assert cells[0] == ["0", "v-half", *start, "2.50", "0.500", "0.400", "30.5", "32.0", "done"]
    assert {row[0]: row[-1] for row in cells[1:]} == {
        "1": "out of memory",
        "2": "out of time",
        "3": "failed: RuntimeError: something \\| else",
        "4": "failed: candidate: error: no Python at x",
        "5": "not run",
    }
    assert collect_sweep.main([str(measured)]) == 0
    text = capsys.readouterr().out
    assert "out of memory" in text
    assert "s measured" in text


@pytest.mark.parametrize("form", ["text", "markdown", "csv"])
def test_nothing_in_a_log_is_obeyed_by_a_terminal(
    form: str, measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = next(measured.rglob("stderr.log"))
    log.write_text("RuntimeError: \x1b]0;title\x07 \x1b[2J\n")
    assert collect_sweep.main([str(measured), "--format", form]) == 0
    text = capsys.readouterr().out
    assert "\\x1b[2J" in text
    assert "\x1b" not in text


def test_a_table_is_written_whole_or_not_at_all(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(measured.iterdir())
    assert collect_sweep.main([str(measured), "--output", str(measured / "none" / "table.md")]) == 2
    table = measured / "none" / "table.md"
    said = f"collect_sweep: error: --output: cannot write {table}: No such file or directory\n"
    assert capsys.readouterr().err == said
    assert sorted(measured.iterdir()) == before


def test_the_flags_of_a_candidate_are_split_as_a_shell_does(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert collect_sweep.main([str(measured), "--flags", "5"]) == 0
    assert capsys.readouterr().out == "--recompute-granularity\nfull\n"
    assert collect_sweep.main([str(measured), "--count"]) == 0
    assert capsys.readouterr().out == "6\n"


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        (None, [], "candidates.csv: No such file or directory"),
        ("method\nv-half\n", [], "lacks the column flags"),
        ("method,flags\n", [], "holds no candidate"),
        ("method,flags,mfu\nv-half,--x,fast\n", [], "row 0: mfu is 'fast', no number"),
        ("method,flags\nv-half,--x\n", ["--flags", "1"], "no candidate 1; there are 0 to 0"),
    ],
)
def test_a_sweep_that_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, arguments: list[str], said: str
) -> None:
    if text is not None:
        (tmp_path / "candidates.csv").write_text(text)
    assert collect_sweep.main([str(tmp_path), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("collect_sweep: error: ")
    assert error.count("\n") == 1
    assert said in error
