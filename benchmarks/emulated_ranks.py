"""Ranks as processes forked from this one after its imports, joined over gloo on this machine."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.schedules.utils.child_processes import end_with_parent

_AHEAD_S = 0.02
_SET_TIMERSLACK = 29


class RankError(RuntimeError):
    """A rank failed, died or hung; the message holds what it wrote."""


def run_ranks(ranks: int, body: Callable[[], Any], timeout: float) -> list[Any]:
    """Returns the results of ``body()`` on ``ranks`` forked gloo ranks.

    Raises:
        RankError: as soon as one rank fails, or where they take longer than ``timeout`` seconds; all are ended then.
    """
    with running_ranks(ranks, body, timeout) as results:
        return results()


@contextmanager
def running_ranks(ranks: int, body: Callable[[], Any], timeout: float) -> Iterator[Callable[[], list[Any]]]:
    """Works like :func:`run_ranks`, but yields what waits for the results. At the end of the context all are ended."""
    context = multiprocessing.get_context("fork")
    gc.collect()
    gc.freeze()  # or the first full collection copies all that was imported into every rank
    with tempfile.TemporaryDirectory(prefix="emulated-") as folder:
        processes, pipes = [], {}
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(rank, ranks, Path(folder), theirs, body, timeout))
            process.start()
            theirs.close()
            processes.append(process)
            pipes[ours] = rank
        try:
            yield partial(_results, pipes, Path(folder), time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
            gc.unfreeze()


def _results(pipes: dict[Connection, int], folder: Path, deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    waited = dict(pipes)
    while waited:
        ready = wait(list(waited), deadline - time.monotonic())
        if not ready:
            raise RankError(f"ranks {sorted(waited.values())} are not done in time")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waited.pop(pipe)
            try:
                results[rank] = pipe.recv()
            except EOFError:
                said = (folder / f"{rank}.log").read_text(errors="replace")[-4000:]
                raise RankError(f"rank {rank} failed:\n{said or 'it was killed'}") from None
    return [results[rank] for rank in sorted(results)]


def _rank(rank: int, ranks: int, folder: Path, pipe: Connection, body: Callable[[], Any], timeout: float) -> None:
    end_with_parent()
    with open(folder / f"{rank}.log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            torch.set_num_threads(1)
            _keep_time()
            store, limit = f"file://{folder}/store", timedelta(seconds=timeout)
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=limit)
            pipe.send(body())
            dist.barrier()  # nobody takes its connections away while another still talks
        except BaseException:
            traceback.print_exc(file=log)
            log.flush()
            os._exit(1)
    os._exit(0)


def _keep_time() -> None:
    """Gives this process and gloo's later threads precise wake-ups on a busy machine.

    Linux lets a sleep last 50 microseconds longer, to save wake-ups. Ranks stand for machines of their own: where the
    system allows it they go before other processes.
    """
    ctypes.CDLL(None).prctl(_SET_TIMERSLACK, 1)
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def begin_together() -> float:
    """Returns the time, at the same moment on all ranks, soon after the last has called this."""
    last = torch.tensor([time.monotonic()], dtype=torch.float64)
    dist.all_reduce(last, dist.ReduceOp.MAX)
    time.sleep(max(last.item() + _AHEAD_S - time.monotonic(), 0.0))
    return time.monotonic()
