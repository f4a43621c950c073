"""Ranks of a training job as separate processes: forked from this one where possible, otherwise started anew."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.emulated_ranks import RankError
from megatron.schedules.utils.child_processes import end_with_parent, safe_path


def run_ranks(
    world: int, body: Callable[[], Any], environment: Mapping[str, str], *, timeout: float, fresh: bool = False
) -> list[Any]:
    """Returns the results of ``body()`` on ``world`` ranks, which have torchrun's environment.

    Args:
        body: importable by its name.
        environment: set on the ranks beside torchrun's. ``LOCAL_RANK`` here wins: ranks may share a GPU.
        timeout: seconds for all of them.
        fresh: whether they must be new interpreters, which have imported nothing.

    Raises:
        RankError: as soon as one rank fails, or where they are not done in time; with what the first of them wrote.
    """
    context = multiprocessing.get_context("spawn" if fresh or not _forks() else "fork")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        shared = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
        shared |= {"MASTER_PORT": str(_free_port())}
        processes, ranks = [], {}
        gc.collect()
        gc.freeze()  # or the first full collection copies all that was imported into every rank
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            log = Path(folder, f"{rank}.log")
            mine = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | dict(environment)
            process = context.Process(target=_rank, args=(body, log, theirs))  # type: ignore[attr-defined]
            # A new interpreter imports what ``body`` needs before it runs any of ours.
            with safe_path(), _environment(mine):
                process.start()
            theirs.close()
            processes.append(process)
            ranks[ours] = (rank, log)
        try:
            return _results(ranks, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
            gc.unfreeze()


def _results(ranks: Mapping[Connection, tuple[int, Path]], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    waited = dict(ranks)
    while waited:
        ready = wait(list(waited), max(deadline - time.monotonic(), 0.0))
        if not ready:
            hung = sorted(rank for rank, _ in waited.values())
            raise RankError(f"ranks {hung} are not done in time\n{_said(waited.values())}")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank, log = waited.pop(pipe)
            try:
                ok, results[rank] = pipe.recv()
            except EOFError:
                ok, results[rank] = False, "it died without a word"
            if not ok:
                raise RankError(f"rank {rank}: {results[rank]}\n{_said([(rank, log)])}")
    return [results[rank] for rank in sorted(results)]


def _said(ranks: Any) -> str:
    return "\n".join(f"--- rank {rank}\n{log.read_text(errors='replace')[-6000:]}" for rank, log in sorted(ranks))


@contextmanager
def _environment(added: Mapping[str, str]) -> Iterator[None]:
    kept = dict(os.environ)
    os.environ |= added
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
        os.environ |= kept


def _rank(body: Callable[[], Any], log: Path, pipe: Connection) -> None:
    end_with_parent()
    with log.open("w", buffering=1) as file, redirect_stdout(file), redirect_stderr(file):
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            result = body()
            pipe.send((True, result))
            _leave_together()
        except BaseException as error:
            traceback.print_exc(file=file)
            file.flush()
            notes = "; ".join(getattr(error, "__notes__", []))
            pipe.send((False, f"{type(error).__name__}: {str(error).strip()[:300]} {notes}".strip()))
            os._exit(1)  # as a crash would: nothing is waited for
    os._exit(0)


def _leave_together() -> None:
    """Keeps connections open until all ranks are done."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()


@cache
def _forks() -> bool:
    """Whether a child forked from this process can use its GPU: an import may have started the driver."""
    import torch

    if not torch.cuda.is_available():
        return True
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_use_the_gpu)
    child.start()
    child.join(120)
    if child.is_alive():
        child.kill()
    return child.exitcode == 0


def _use_the_gpu() -> None:
    import torch

    end_with_parent()
    os._exit(0 if torch.zeros(1, device="cuda").add_(1).item() == 1 else 1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
