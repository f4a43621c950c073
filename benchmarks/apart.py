"""Measures rows in a separate process, where imports and replacements stay; and prepares Megatron on its ranks."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

from benchmarks.parts import Row, Say
from megatron.schedules.utils.child_processes import end_with_parent, safe_path

Measure = Callable[[bool, Say], Iterator[Row]]


def rows_apart(measure: Measure, quick: bool, say: Say) -> Iterator[Row]:
    """Yields the rows of ``measure(quick, say)``, a module-level function, from a new process.

    Raises:
        RuntimeError: where that process fails; it has written why.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_measured, args=(measure, quick, theirs))
    with safe_path():
        process.start()
    theirs.close()
    try:
        while True:
            kind, what = ours.recv()
            if kind == "end":
                return
            if kind == "say":
                say(what)
            else:
                yield what
    except EOFError:
        raise RuntimeError(f"{measure.__module__} failed; the lines above say why") from None
    finally:
        process.terminate()
        process.join()


def _measured(measure: Measure, quick: bool, pipe: Connection) -> None:
    end_with_parent()
    os.dup2(2, 1)  # Megatron writes to standard output, where rows are written
    for row in measure(quick, lambda text: pipe.send(("say", text))):
        pipe.send(("row", row))
    pipe.send(("end", None))


def tell_megatron() -> None:
    """Sets the environment variables of torchrun that Megatron reads, for a rank of the default process group."""
    import torch.distributed as dist

    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
