"""Starts the data-parallel reduction of each gradient bucket as soon as its gradients are complete."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import chain
from typing import Any

from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor


class GradientReduction:
    """Decides when the reduction of each bucket starts, in place of the hooks of ``DistributedDataParallel``.

    Stock starts a bucket when each of its parameters has a gradient from the last microbatch's backward. A split
    backward is two passes, with passes of earlier microbatches between them. So the program announces the last pass of
    a chunk (:meth:`completing`). From the start of that pass, each bucket starts once it misses no gradient. With
    vocabulary parallelism, the gradients of the vocabulary have their own last passes (:meth:`arriving`).

    Buckets start in stock's order; buckets whose gradients are complete later start after the others. So all
    data-parallel ranks start them in the same order, even if experts received tokens on some ranks only.

    With one hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``), a bucket that starts during another reduction blocks
    all computation. Then buckets are spread evenly over the remaining passes.

    Args:
        chunks: model chunks of this rank.
        overlapped: whether the chunks are ``DistributedDataParallel`` with overlapped reduction. Otherwise nothing is
            done.
    """

    def __init__(self, chunks: Sequence[Any], *, overlapped: bool) -> None:
        self._chunks = [reduced(chunk) for chunk in chunks]
        self._groups = [
            [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups] if overlapped and chunk is not None else []
            for chunk in self._chunks
        ]
        self._paced = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
        self._queue: deque[tuple[Any, Callable[[], None]]] = deque()
        self._missing: dict[Any, set[Tensor]] = {}
        self._incomplete: set[Tensor] = set()
        self._pace = self._left = 0
        for group in chain(*self._groups):
            # Stock's hooks call this after a gradient is accumulated. An instance attribute overrides the method.
            group.register_grad_ready = partial(self._ready, group)
            group.is_first_batch = False  # in its first batch stock counts hooks and reduces again at the end

    def begin_pass(self) -> None:
        """Starts buckets before a pass, if some are ready."""
        self._left = self._pace
        self._start()

    def completing(
        self,
        chunk: int,
        late: Collection[Tensor] | None,
        passes_left: int,
        later: Collection[Tensor] = (),
    ) -> None:
        """Announces the last pass of a chunk that adds to the gradients of its layers.

        Args:
            chunk: chunk of this rank.
            late: parameters to whose gradients the pass may add; None for all.
            passes_left: number of passes of this rank that follow.
            later: parameters whose last gradients come in a later pass, see :meth:`arriving`.
        """
        self._incomplete.update(later)
        for group in sorted(self._groups[chunk], key=lambda group: not self._incomplete.isdisjoint(group.params)):
            force = self._chunks[chunk].force_all_reduce
            wanted = set(group.params) if late is None else self._incomplete.union(late)
            self._missing[group] = wanted.intersection(group.params)
            self._queue.append((group, partial(group.start_grad_sync, force_all_reduce=force)))
        self._pace = -(-len(self._queue) // (1 + passes_left)) if self._paced else len(self._queue)
        self._left = self._pace
        self._start()

    def arriving(self, parameters: Collection[Tensor]) -> None:
        """Announces the pass that completes the gradients of ``parameters``, if it is not the layers' last."""
        self._incomplete.difference_update(parameters)

    def complete(self, chunk: int) -> None:
        """Ends the chunk's passes, even if some parameters received no gradient."""
        for group in self._groups[chunk]:
            self._missing[group].clear()
        self._start()

    def finish(self) -> None:
        """Starts the remaining buckets after the last pass."""
        self._left = len(self._queue)
        self._start()

    def close(self) -> None:
        """Returns the buckets to stock's hooks."""
        for group in chain(*self._groups):
            group.__dict__.pop("register_grad_ready", None)

    def _ready(self, group: Any, parameter: Tensor, *_: Any, **__: Any) -> None:
        if group in self._missing and parameter not in self._incomplete:
            self._missing[group].discard(parameter)
            self._start()

    def _start(self) -> None:
        while self._left and self._queue and not self._missing[self._queue[0][0]]:
            _, start = self._queue.popleft()
            self._left -= 1
            start()


def reduced(chunk: Any) -> Any:
    """Returns the ``DistributedDataParallel`` in ``chunk``, which may be wrapped again; None if it has none."""
    try:
        return get_attr_wrapped_model(chunk, "bucket_groups", return_model_obj=True)
    except RuntimeError:
        return None
