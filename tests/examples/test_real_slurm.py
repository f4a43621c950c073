"""examples/slurm under a real SLURM: two nodes of two GPUs as it sees them; ranks train on this machine's CPU."""

from __future__ import annotations

import contextlib
import csv
import getpass
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.examples import real_slurm
from tests.examples.tiny_job import ROOT, SLURM, iterations, make_text, model, prepare, prepare_sweep, run, set_all

pytestmark = pytest.mark.nightly

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(real_slurm.missing()), reason=real_slurm.missing()),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with real_slurm.cluster(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


@pytest.fixture
def folder(slurm: dict[str, str], tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """SLURM and a model for this machine in the environment; no job outlives its test."""
    prepare(tmp_path, text, monkeypatch)
    set_all(monkeypatch, **slurm)
    yield tmp_path
    run("scancel", f"--user={getpass.getuser()}")
    until(lambda: not run("squeue", "--noheader").stdout)


def until(come: Callable[[], bool], state: Callable[[], object] = lambda: "", seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not come():
        assert time.monotonic() < end, f"not within {seconds} s; {state()}"
        time.sleep(0.2)


def processes() -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    """All of this machine's, with the environment they were started in."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            yield process, process.environ()


class Job:
    """A job in the queue, with two GPUs on each node."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        self._output = folder / "job.out"
        done = run("sbatch", "--parsable", "--gpus-per-node=2", f"--output={self._output}", *arguments)
        assert done.returncode == 0, done.stderr
        self.id = done.stdout.strip()

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    def shown(self, what: str) -> str:
        """What SLURM says of it: its JobState, StartTime..."""
        return re.search(rf"\b{what}=(\S*)", run("scontrol", "show", "job", "--oneliner", self.id).stdout)[1]

    def ended(self) -> bool:
        return self.shown("JobState") in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")

    def until(self, come: Callable[[], bool]) -> None:
        """Until the job has come so far, in whichever start; it must not end before."""
        until(lambda: come() or self.ended(), lambda: f"{self.shown('JobState')}: {self.output[-4000:]}")
        assert come(), self.output[-4000:]

    def until_ended(self) -> str:
        """Until it is in the queue no more; the output of all its starts."""
        self.until(self.ended)
        return self.output

    def ranks(self, start: int) -> list[psutil.Process]:
        """Those there are of a start, in their order, without their helpers."""
        expected = {"SLURM_JOB_ID": self.id, "SLURM_RESTART_COUNT": str(start or None)}
        found = {}
        for process, environment in processes():
            if {name: str(environment.get(name)) for name in expected} == expected and "RANK" in environment:
                with contextlib.suppress(psutil.Error):
                    if "torch.distributed.run" in psutil.Process(process.ppid()).cmdline():
                        found[int(environment["RANK"])] = process
        return [found[rank] for rank in sorted(found)]


def test_a_pipeline_over_two_nodes_trains_to_its_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "four.sh").write_text(model(4))
    set_all(monkeypatch, TRAIN_ITERS=3)
    job = Job(folder, "--nodes=2", SLURM / "many_nodes.sbatch", folder / "four.sh")
    output = job.until_ended()
    assert iterations(output) == [1, 2, 3], output[-4000:]
    assert "2 nodes x 2 ranks" in output
    assert "done: 3 iterations" in output
    assert job.shown("JobState") == "COMPLETED"
    for node in (0, 1):
        logs = list((folder / "run" / "logs" / f"{job.id}-0" / f"node-{node}").rglob("stdout.log"))
        assert sorted(log.parent.name for log in logs) == ["0", "1"]


def check_that_it_went_on_where_it_saved(output: str, wanted: int) -> None:
    """Two starts: the first was warned and saved, the second trained the rest, and nothing twice."""
    first, second = output.split("queued again")
    saved = int(re.search(rf"ended with status 0 at iteration (\d+) of {wanted}: $", first)[1])
    assert first.count("told to end: saving") == 1
    assert 0 < saved < wanted
    assert iterations(first) == list(range(1, saved + 1))
    assert f"from iteration {saved} of {wanted}" in second
    assert iterations(second) == list(range(saved + 1, wanted + 1))
    assert f"done: {wanted} iterations" in second


def test_a_job_that_is_sent_usr1_saves_is_queued_again_and_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_all(monkeypatch, TRAIN_ITERS=100)
    job = Job(folder, "--nodes=2", SLURM / "many_nodes.sbatch", folder / "tiny.sh")
    job.until(lambda: 3 in iterations(job.output))
    assert run("scancel", "--batch", "--signal=USR1", job.id).returncode == 0
    check_that_it_went_on_where_it_saved(job.until_ended(), 100)
    assert job.shown("JobState") == "COMPLETED"
    assert job.shown("Restarts") == "1"


def test_a_preempted_job_is_warned_saves_and_comes_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, TRAIN_ITERS=100)
    job = Job(folder, SLURM / "one_node.sbatch", folder / "tiny.sh")
    job.until(lambda: 3 in iterations(job.output))
    (folder / "urgent").mkdir()
    urgent = Job(folder / "urgent", "--partition=high", "--nodes=2", "--exclusive", "--wrap=sleep 1")
    check_that_it_went_on_where_it_saved(job.until_ended(), 100)
    assert (job.shown("JobState"), urgent.shown("JobState")) == ("COMPLETED", "COMPLETED")
    assert job.shown("StartTime") >= urgent.shown("EndTime")  # its last start


def test_a_killed_rank_ends_the_job_which_starts_again_only_if_it_got_further(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_all(monkeypatch, TRAIN_ITERS=100000, SAVE_INTERVAL=5)
    job = Job(folder, "--nodes=2", SLURM / "many_nodes.sbatch", folder / "tiny.sh")
    job.until((folder / "run" / "checkpoints" / "latest_checkpointed_iteration.txt").exists)
    job.ranks(0)[3].send_signal(signal.SIGKILL)  # on the second node
    job.until(lambda: "queued again" in job.output)
    job.until(lambda: len(job.ranks(1)) == 4)
    job.ranks(1)[0].send_signal(signal.SIGKILL)
    first, second = job.until_ended().split(": queued again\n")
    saved = re.search(r"ended with status (?!0)\d+ at iteration (\d+) of 100000$", first)[1]
    assert "exitcode  : -9" in first
    assert f"failed with status 1 and nothing saved since iteration {saved}: not" in second
    assert job.shown("JobState") == "FAILED"


def test_a_sweep_is_an_array_of_jobs_and_a_table_after_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = prepare_sweep(folder, monkeypatch)
    done = run("bash", SLURM / "sweep.sh", "tiny", "--partition=high")
    assert done.returncode == 0, done.stderr
    array, last = re.fullmatch(
        rf"sweep.sh: 2 candidates in job (\d+); job (\d+) writes {sweep}/table.md\n", done.stdout
    ).groups()
    state = "scontrol show job --oneliner"
    until(lambda: "JobState=COMPLETED" in run(*state.split(), last).stdout, lambda: run("squeue").stdout)
    assert "JobState=COMPLETED" in run(*state.split(), f"{array}_1").stdout
    assert "JobState=FAILED" in run(*state.split(), f"{array}_0").stdout
    with (sweep / "table.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [(row["candidate"], row["method"]) for row in rows] == [("1", "v-half"), ("0", "v-min")]
    assert rows[0]["outcome"] == "done", (sweep / "job-1.out").read_text()[-3000:]
    assert float(rows[0]["measured_seconds"]) > 0
    assert rows[1]["outcome"].startswith("failed: pretrain_gpt.py: error: --pipeline-schedule v-min has 4 stages")
    assert "| 1 | v-half | 1 x 1 x 2 x 1 | 2.00 |" in (sweep / "table.md").read_text()


def test_a_cluster_ends_with_all_its_jobs_when_the_program_that_asked_for_it_is_killed(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    where = tmp_path_factory.mktemp("slurm")
    asks = f"""
import os, pathlib, subprocess, sys
from tests.examples import real_slurm
with real_slurm.cluster(pathlib.Path({str(where)!r})) as environment:
    job = ["sbatch", "--output=/dev/null", "--wrap", "setsid sleep 987 & sleep 987"]
    subprocess.run(job, env=os.environ | environment, check=True)
    print("asked", flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", asks], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        until(lambda: "asked" in program.stdout.readline())

        def of_cluster() -> list[str]:
            return [process.name() for process, its in processes() if its.get("SLURM_CONF") == f"{where}/slurm.conf"]

        until(lambda: of_cluster().count("sleep") == 2, of_cluster, 60)
        program.kill()
    until(lambda: not of_cluster(), of_cluster, 60)
