"""Shows progress: a bar on a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TextIO

from megatron.schedules.utils.progress import Progress, unheard

# Short work writes nothing.
_EVERY_S = 10.0


def shown(what: str, stream: TextIO | None, every: float = _EVERY_S) -> AbstractContextManager[Progress]:
    """Shows on ``stream`` the progress that the ``with`` block reports.

    Args:
        what: name of the work, such as ``planning v-half``.
        stream: a terminal gets a bar, which is removed at the end. Any other file gets a line at intervals. None
            disables output.
        every: seconds between lines.
    """
    if stream is None:
        return nullcontext(unheard)
    return _bar(what, stream) if stream.isatty() else _lines(what, stream, every)


@contextmanager
def _bar(what: str, stream: TextIO) -> Iterator[Progress]:
    from rich import progress
    from rich.console import Console

    words = progress.TextColumn("{task.description}"), progress.TextColumn("{task.percentage:>3.0f} %")
    columns = words[0], progress.BarColumn(), words[1], progress.TimeElapsedColumn()
    with progress.Progress(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda share: bar.advance(task, share)


@contextmanager
def _lines(what: str, stream: TextIO, every: float) -> Iterator[Progress]:
    done, begun = 0.0, time.monotonic()

    def advance(share: float) -> None:
        nonlocal done
        done += share

    def run() -> None:
        while not ended.wait(every):
            stream.write(f"{what}: {100 * min(1.0, done):.0f} % after {time.monotonic() - begun:.0f} s\n")
            stream.flush()

    # A thread, because the work may report nothing for a long time. It ends with the process in any case.
    ended = threading.Event()
    thread = threading.Thread(target=run, name="progress", daemon=True)
    thread.start()
    try:
        yield advance
    finally:
        ended.set()
        thread.join()
