"""Starts the data-parallel reduction of each bucket of gradients as soon as its own gradients are complete."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor


class GradientReduction:
    """Decides, in place of the hooks of Megatron's ``DistributedDataParallel``, when the reduction of a bucket starts.

    Stock starts it when each of the bucket's parameters has a gradient from the last microbatch's backward. A split
    backward is two passes, with passes of earlier microbatches between them. So the program says which pass is a
    chunk's last (:meth:`completing`). From its beginning on each bucket starts that misses no gradient. The gradients
    of a vocabulary that all ranks share have last passes of their own (:meth:`arriving`).

    Buckets start in stock's order, and those that miss gradients longer start after the others. So all data-parallel
    ranks start them alike, even where experts got tokens on some ranks only.

    With one hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``) all computing waits behind a bucket that starts while
    another is being reduced. Then buckets are spread evenly over the passes that are left.

    Args:
        chunks: this rank's model chunks.
        overlapped: whether they are ``DistributedDataParallel`` with overlapped reduction; otherwise nothing is done.
    """

    def __init__(self, chunks: Sequence[Any], *, overlapped: bool) -> None:
        self._chunks = chunks
        self._groups = [
            [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups] if overlapped else [] for chunk in chunks
        ]
        self._paced = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
        self._queue: deque[tuple[Any, Callable[[], None]]] = deque()
        self._missing: dict[Any, set[Tensor]] = {}
        self._later: set[Tensor] = set()
        self._pace = self._left = 0
        for group in chain(*self._groups):
            # Stock's hooks call it once a gradient is added up; an attribute of the instance comes first.
            group.register_grad_ready = partial(self._ready, group)
            group.is_first_batch = False  # in which stock would count hooks, and reduce again at the end

    def begin_pass(self) -> None:
        """Called before each pass: it may start buckets."""
        self._left = self._pace
        self._start()

    def completing(
        self,
        chunk: int,
        late: Collection[Tensor] | None,
        passes_left: int,
        later: Collection[Tensor] = (),
    ) -> None:
        """Called before the last pass of a chunk that adds to its layers' gradients.

        Args:
            chunk: of this rank.
            late: the parameters whose gradients it may add to; None for all.
            passes_left: how many passes of this rank follow it.
            later: those whose last gradients come in a later pass: :meth:`arriving`.
        """
        self._later.update(later)
        for group in sorted(self._groups[chunk], key=lambda group: not self._later.isdisjoint(group.params)):
            force = self._chunks[chunk].force_all_reduce
            wanted = set(group.params) if late is None else self._later.union(late)
            self._missing[group] = wanted.intersection(group.params)
            self._queue.append((group, partial(group.start_grad_sync, force_all_reduce=force)))
        self._pace = -(-len(self._queue) // (1 + passes_left)) if self._paced else len(self._queue)
        self._left = self._pace
        self._start()

    def arriving(self, parameters: Collection[Tensor]) -> None:
        """Called before the pass that completes the gradients of ``parameters``, where that is not the layers' last."""
        self._later.difference_update(parameters)

    def complete(self, chunk: int) -> None:
        """Called after all of these passes, whether or not every parameter got a gradient."""
        for group in self._groups[chunk]:
            self._missing[group].clear()
        self._start()

    def finish(self) -> None:
        """Starts the rest, after the last pass."""
        self._left = len(self._queue)
        self._start()

    def close(self) -> None:
        """Returns the buckets to stock's hooks."""
        for group in chain(*self._groups):
            group.__dict__.pop("register_grad_ready", None)

    def _ready(self, group: Any, parameter: Tensor, *_: Any, **__: Any) -> None:
        if group in self._missing and parameter not in self._later:
            self._missing[group].discard(parameter)
            self._start()

    def _start(self) -> None:
        while self._left and self._queue and not self._missing[self._queue[0][0]]:
            _, start = self._queue.popleft()
            self._left -= 1
            start()
