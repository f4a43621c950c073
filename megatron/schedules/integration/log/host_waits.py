"""Counts where the host waits for its device, as torch's debug mode reports it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

# Part of the warning with which torch reports a wait.
_WAIT = "called a synchronizing CUDA operation"


@contextmanager
def host_waits(found: Counter[str] | None) -> Iterator[None]:
    """Adds the waits inside the block to ``found``, by file and line. Other warnings are shown after the block.

    Args:
        found: the counts; None to count nothing. Counting needs a GPU.
    """
    if found is None:
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for each in shown:
        if _WAIT in str(each.message):
            found[f"{Path(each.filename).name}:{each.lineno}"] += 1
        else:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
