"""A real SLURM in a folder: its daemons, and two nodes of two GPUs each that are all this machine and have no GPU.

    apt-get install slurm-wlm munge                     # what it needs; neither has to be set up, or to run
    python -m tests.examples.real_slurm FOLDER          # says what to export, and runs until Ctrl-C

For the tests of examples/slurm, and to play with. Everything it writes is in FOLDER; every process that it started, of
its jobs too, ends with it. Any user may run it; jobs are then this user's. Tried with SLURM 22.05, Debian 12's.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import getpass
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
# Names that every machine finds without being told: the ranks meet on the first.
NODES = ("127.0.0.1", "127.0.0.2")
GPUS = 2
DAEMONS = ("munged", "slurmctld", "slurmd")
COMMANDS = ("sbatch", "scancel", "scontrol", "sinfo", "srun")
LONGEST = 60  # of the folder's path: sockets in it have a name of at most 107, and one holds the node, job and step
READY = f"the cluster is up: {len(NODES)} nodes of {GPUS} GPUs"

# A requeued job starts after cred_expire (120 s if nothing is said), when the scheduler looks again (60 s). No cgroups:
# they would be the machine's. 64 CPUs, whatever there are: the scripts ask for so many.
CONFIGURATION = """
ClusterName=real
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket,cred_expire=5
MessageTimeout=60
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MailProg=/bin/true
FirstJobId={first_job}
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{warn_preempted}
NodeName={nodes[0]} Port={ports[1]} CPUs=64 Gres=gpu:{gpus}
NodeName={nodes[1]} Port={ports[2]} CPUs=64 Gres=gpu:{gpus}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=300
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


def _program(name: str) -> str | None:
    """Where it is; those of the system are not on everyone's PATH."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin")


def missing() -> str:
    """Why there can be no cluster on this machine; empty where there can."""
    lacking = [name for name in DAEMONS if _program(name) is None] + [c for c in COMMANDS if shutil.which(c) is None]
    return f"no {', '.join(lacking)} that may be run here: apt-get install slurm-wlm munge" if lacking else ""


def version() -> tuple[int, int]:
    """Of the SLURM installed: (22, 5)."""
    said = subprocess.run([_program("slurmctld") or "slurmctld", "-V"], capture_output=True, text=True, check=True)
    found = re.search(r"(\d+)\.(\d+)", said.stdout)
    if found is None:
        raise RuntimeError(f"slurmctld -V says {said.stdout!r}")
    return int(found[1]), int(found[2])


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """A cluster in ``folder``, as a process of its own; what to put into the environment of SLURM's commands.

    It ends with the context, and as well where this process is killed: its end of the pipe is closed then.
    """
    command = [sys.executable, "-m", "tests.examples.real_slurm", "--while-input-is-open", str(folder)]
    program = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert program.stdin is not None
    assert program.stdout is not None
    try:
        if not any(READY in line for line in program.stdout):
            raise RuntimeError(f"no cluster in {folder}: {' '.join(command)} ended with status {program.wait()}")
        yield {"SLURM_CONF": str(folder / "slurm.conf")}
    finally:
        program.terminate()
        program.wait()
        program.stdin.close()


def _configure(folder: Path) -> None:
    if len(str(folder)) > LONGEST:
        raise RuntimeError(f"{folder} is too long a name for sockets in it: at most {LONGEST} characters")
    for name in ("state", *NODES):
        (folder / name).mkdir(parents=True)
    with contextlib.ExitStack() as held:  # all at once, so that they differ
        sockets = [held.enter_context(socket.socket()) for _ in range(1 + len(NODES))]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in sockets]
    # Up to 22.05 a line with PreemptParameters is an error; from 23.02 on only the other is in the manual.
    older = version() < (23, 2)
    warn = "SlurmctldParameters=preempt_send_user_signal" if older else "PreemptParameters=send_user_signal"
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(
            folder=folder,
            host=socket.gethostname().partition(".")[0],
            user=getpass.getuser(),
            ports=ports,
            first_job=1 + time.time_ns() // 10**6 % 9000,  # jobs take their ports by number: not those of the last run
            nodes=NODES,
            gpus=GPUS,
            warn_preempted=warn,
        )
    )
    for number in range(GPUS):
        (folder / f"gpu{number}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{GPUS - 1}]\n")
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))


def _start(folder: Path) -> None:
    """The daemons as children of this process; returns when both nodes are idle."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    environment["SLURM_CONF"] = str(folder / "slurm.conf")
    started: dict[str, subprocess.Popen[bytes]] = {}

    def daemon(name: str, *command: str) -> None:
        with (folder / f"{name}.err").open("wb") as errors:
            started[name] = subprocess.Popen(
                [_program(command[0]) or command[0], *command[1:]],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
            )

    def idle() -> bool:
        asked = ["sinfo", "--noheader", "--partition=low", "--Node", "--format=%T"]
        said = subprocess.run(asked, env=environment, capture_output=True, text=True)
        return said.stdout.split() == ["idle"] * len(NODES)

    def wait_for(what: str, come: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not come():
            ended = [name for name, process in started.items() if process.poll() is not None]
            if ended or time.monotonic() > end:
                for errors in folder.glob("*.err"):
                    print(f"== {errors.name}\n{errors.read_text(errors='replace')[-3000:]}", file=sys.stderr)
                raise RuntimeError(f"{', '.join(ended)} ended" if ended else f"no {what} within a minute")
            time.sleep(0.1)

    # --force: folders above it may be closed to others, as those of tests are.
    files = {"key-file": "munge.key", "socket": "munge.socket", "seed-file": "munged.seed"}
    files |= {"pid-file": "munged.pid", "log-file": "munged.log"}
    daemon(
        "munged", "munged", "--foreground", "--force", *(f"--{flag}={folder / name}" for flag, name in files.items())
    )
    wait_for("socket of munged", (folder / "munge.socket").exists)
    daemon("slurmctld", "slurmctld", "-D")
    for node in NODES:
        daemon(node, "slurmd", "-D", "-N", node)
    wait_for("idle nodes", idle)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _end_all() -> None:
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        time.sleep(0.05)
        _reap()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where there is nothing yet")
    parser.add_argument("--while-input-is-open", action="store_true", help="end with standard input, too")
    options = parser.parse_args()
    if lacking := missing():
        parser.error(lacking)
    folder = options.folder.resolve()

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    # Processes whose parent is gone become this one's children rather than init's: daemons of a job, and what they
    # started. So all of them can be found.
    subreaper = 36
    ctypes.CDLL(None).prctl(subreaper, 1)
    try:
        _configure(folder)
        _start(folder)
        print(f"export SLURM_CONF={folder / 'slurm.conf'}")
        print(f"# {READY}; partitions low and, preempting it, high. Logs: {folder}/*.log")
        print(f"# Ctrl-C, or kill {os.getpid()}, ends it and all its jobs.", flush=True)
        while not (options.while_input_is_open and select.select([sys.stdin], [], [], 0)[0]):
            time.sleep(0.2)
            _reap()
    except KeyboardInterrupt:
        pass
    except (OSError, RuntimeError) as error:
        sys.exit(f"real_slurm: error: {error}")
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        _end_all()


if __name__ == "__main__":
    main()
