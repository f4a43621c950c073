"""Plays sbatch, srun and scontrol on this machine, as far as examples/slurm needs them.

``standin_slurm.py sbatch|srun|scontrol ...`` acts as the command; :func:`install` puts the three on a PATH. Jobs run at
once, one after another, with a copy of their script, as in SLURM's spool folder. A job that comes to print the text in
$STANDIN_WARN_AT gets the signal that it asks for with --signal.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil


def install(folder: Path) -> None:
    """Make commands of the three names in ``folder``."""
    folder.mkdir()
    for name in ("sbatch", "srun", "scontrol"):
        command = folder / name
        command.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, __file__, name])} "$@"\n')
        command.chmod(0o755)


def _options(words: list[str]) -> tuple[dict[str, str], list[str]]:
    found, rest = {}, list(words)
    while rest and rest[0].startswith("--"):
        name, _, value = rest.pop(0)[2:].partition("=")
        found[name] = value
    return found, rest


def sbatch(words: list[str]) -> int:
    """Run a script, or an array of it; fails as the last of them does."""
    given, (script, *arguments) = _options(words)
    written = [
        line.split(maxsplit=1)[1] for line in Path(script).read_text().splitlines() if line.startswith("#SBATCH")
    ]
    options = _options(written)[0] | given
    state = Path(os.environ["STANDIN_STATE"])
    job = 100 + len(list(state.glob("job-*")))
    (state / f"job-{job}").write_text(shlex.join(words))
    first, _, last = options.get("array", "").partition("%")[0].partition("-")
    for task in range(int(first), int(last) + 1) if first else [None]:
        _run_job(job if task is None else 1000 * job + task, script, arguments, options, task)
    print(job)
    return 0


def _run_job(job: int, script: str, arguments: list[str], options: dict[str, str], task: int | None) -> None:
    nodes = options.get("nodes", "1")
    name = options["job-name"]
    output = options.get("output", "slurm-%j.out")
    for pattern, value in {"%x": name, "%j": str(job), "%a": str(task)}.items():
        output = output.replace(pattern, value)
    environment = os.environ | {
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_NAME": name,
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NODELIST": f"node[1-{nodes}]",
        "SLURM_SUBMIT_DIR": os.getcwd(),
        "SLURM_CPUS_PER_TASK": options.get("cpus-per-task", "1"),
    }
    if task is not None:
        environment["SLURM_ARRAY_TASK_ID"] = str(task)
    requeued = Path(os.environ["STANDIN_STATE"]) / f"requeue-{job}"
    for restart in range(5):
        if restart:
            environment["SLURM_RESTART_COUNT"] = str(restart)
        with tempfile.TemporaryDirectory() as spool, open(output, "a") as log:
            copy = shutil.copy(script, Path(spool) / "slurm_script")
            batch = subprocess.Popen(["bash", copy, *arguments], env=environment, stdout=log, stderr=subprocess.STDOUT)
            if "STANDIN_WARN_AT" in os.environ:
                begin = log.tell()
                threading.Thread(
                    target=_warn, args=(batch, Path(output), begin, options["signal"]), daemon=True
                ).start()
            status = batch.wait()
        with open(output, "a") as log:
            log.write(f"stand-in: job {job} ended with status {status}\n")
        if not requeued.exists() or "no-requeue" in options:
            return
        requeued.unlink()


def _warn(batch: subprocess.Popen[bytes], output: Path, begin: int, asked: str) -> None:
    found = re.fullmatch(r"B:(\w+)@\d+", asked)
    assert found is not None, "the batch script alone is to be warned"
    while batch.poll() is None:
        if os.environ["STANDIN_WARN_AT"] in output.read_text(errors="replace")[begin:]:
            batch.send_signal(signal.Signals[f"SIG{found[1]}"])
            return
        time.sleep(0.05)


def srun(words: list[str]) -> int:
    """Start a process for every node; USR1 goes to every process of the step, as SLURM sends it."""
    options, command = _options(words)
    tasks = [
        subprocess.Popen(command, env=os.environ | {"SLURM_NODEID": str(node)}) for node in range(int(options["nodes"]))
    ]

    def forward(number: int, frame: object) -> None:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    signal.signal(signal.SIGUSR1, forward)
    while any(task.poll() is None for task in tasks):
        time.sleep(0.05)
        if any(task.poll() for task in tasks) and options.get("kill-on-bad-exit") == "1":
            time.sleep(1)
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
    return max(abs(task.wait()) for task in tasks)


def scontrol(words: list[str]) -> int:
    """``show hostnames`` and ``requeue``; every node is this machine."""
    if words[:2] == ["show", "hostnames"]:
        print("\n".join(["127.0.0.1"] * int(os.environ["SLURM_NNODES"])))
        return 0
    action, job = words
    assert action == "requeue"
    (Path(os.environ["STANDIN_STATE"]) / f"requeue-{job}").touch()
    return 0


if __name__ == "__main__":
    sys.exit({"sbatch": sbatch, "srun": srun, "scontrol": scontrol}[sys.argv[1]](sys.argv[2:]))
