"""Ranks forked from this process, which has imported all they need: how multi-process jobs start in no time."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from tests.waiting import HANGS_S


class JobError(AssertionError):
    """A rank failed, died or hung; the message holds every rank's output."""


class _PortTakenError(JobError):
    """Another process took the port of rank 0 after it had been found free."""


_TRIES = 4


def run_ranks(world: int, work: Callable[..., Any], *args: Any, timeout: float = HANGS_S) -> list[Any]:
    """:func:`_run_ranks`, once more where another process took the port that was found free."""
    for _ in range(_TRIES - 1):
        with contextlib.suppress(_PortTakenError):
            return _run_ranks(world, work, *args, timeout=timeout)
    return _run_ranks(world, work, *args, timeout=timeout)


def _run_ranks(world: int, work: Callable[..., Any], *args: Any, timeout: float) -> list[Any]:
    """Fork ``world`` ranks that each call ``work(*args)`` with torchrun's environment set; their results by rank.

    Raises:
        JobError: where a rank raises, exits or is killed, or the job takes longer than ``timeout`` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        port = _free_port()
        ranks = [_fork(rank, world, port, Path(folder), work, args) for rank in range(world)]
        children = {pid: rank for rank, pid in enumerate(ranks)}
        status: dict[int, int] = {}
        end = time.monotonic() + timeout
        while children and time.monotonic() < end and not any(status.values()):
            pid, code = os.waitpid(-1, os.WNOHANG)
            if pid in children:
                status[children.pop(pid)] = os.waitstatus_to_exitcode(code)
            else:
                time.sleep(0.01)
        hung = sorted(children.values()) if not any(status.values()) else []
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for pid in ranks:
            _kill_group(pid)
        failed = {rank: code for rank, code in status.items() if code}
        if failed or hung:
            output = "\n".join(f"--- rank {r}\n{_read(Path(folder) / f'{r}.log')}" for r in range(world))
            what = f"ranks hung for {timeout:g} s: {hung}" if hung else f"exit status by rank: {failed}"
            raise (_PortTakenError if "EADDRINUSE" in output else JobError)(f"{what}\n{output}")
        return [pickle.loads((Path(folder) / f"{rank}.pkl").read_bytes()) for rank in range(world)]


def _fork(rank: int, world: int, port: int, folder: Path, work: Callable[..., Any], args: tuple[Any, ...]) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setpgid(0, 0)
    code = 1
    with open(folder / f"{rank}.log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            output = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), line_buffering=True)
            with redirect_stdout(output), redirect_stderr(output):
                result = work(*args)
            (folder / f"{rank}.pkl").write_bytes(pickle.dumps(result))
            code = 0
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
        except BaseException:
            traceback.print_exc(file=log)
        log.flush()
        sys.stdout.flush()
        os._exit(code)


def _kill_group(pid: int) -> None:
    """End what a rank started and left behind, such as the process that writes stock's checkpoints."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _read(path: Path) -> str:
    return path.read_text(errors="replace")[-6000:] if path.exists() else "(no output)"
