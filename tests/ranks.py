"""Ranks as short-lived processes joined over gloo, and what became of each."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tests.waiting import HANGS_S


@dataclass(frozen=True)
class Outcome:
    """How a rank ended.

    Args:
        value: what its body returned.
        error: the traceback of what it raised, notes included; None for a return or a death without a word.
        exit_code: of the process; negative for a signal.
    """

    value: Any
    error: str | None
    exit_code: int


ENGINE = ("torch.distributed", "megatron.schedules.runtime.engine")


def run_ranks(
    world_size: int, body: Callable[..., Any], *args: Any, timeout: float = HANGS_S, preload: Sequence[str] = ENGINE
) -> list[Any]:
    """What ``body(*args)`` returns on each rank, in rank order; raises with the traceback of a rank that raised."""
    outcomes = outcomes_of(world_size, body, *args, timeout=timeout, preload=preload)
    for rank, outcome in enumerate(outcomes):
        if outcome.error or outcome.exit_code:
            raise AssertionError(f"rank {rank} ended with status {outcome.exit_code}:\n{outcome.error}")
    return [outcome.value for outcome in outcomes]


def outcomes_of(
    world_size: int,
    body: Callable[..., Any],
    *args: Any,
    timeout: float = HANGS_S,
    group_timeout: float = HANGS_S,
    preload: Sequence[str] = ENGINE,
) -> list[Outcome]:
    """How ``body(*args)`` ended on each of ``world_size`` gloo ranks.

    Args:
        body: a module-level function; what it returns must be picklable without sharing memory.
        timeout: seconds for all ranks together, after which they are killed and the test fails.
        group_timeout: seconds of the default process group.
        preload: modules that ranks find imported, where this is the first test of the session to start any.
    """
    # A server that has imported them once forks the ranks: a fork of this process would inherit its threads.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*preload, "tests.quick_forks"])
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        pipes: list[Connection] = []
        processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank,
                args=(rank, world_size, f"{folder}/store", group_timeout, theirs, body, args),
                daemon=True,
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            outcomes = []
            for rank, (pipe, process) in enumerate(zip(pipes, processes, strict=True)):
                left = timeout - (time.monotonic() - started)
                if not pipe.poll(max(left, 0.0)):
                    raise AssertionError(f"rank {rank} hung: nothing heard from it for {timeout} s")
                try:
                    value, error = pipe.recv()
                except EOFError:
                    value, error = None, None
                process.join(max(timeout - (time.monotonic() - started), 1.0))
                assert process.exitcode is not None, f"rank {rank} does not exit"
                outcomes.append(Outcome(value, error, process.exitcode))
            return outcomes
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _rank(
    rank: int,
    world_size: int,
    store: str,
    group_timeout: float,
    pipe: Connection,
    body: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=group_timeout),
    )
    try:
        value = body(*args)
        pipe.send((value, None))
        dist.barrier()  # nobody takes its connections away while another still talks
    except Exception:
        pipe.send((None, traceback.format_exc()))
        pipe.close()
        os._exit(1)  # as a crash would: connections close, nothing is waited for
    pipe.close()
    os._exit(0)
