"""When the data-parallel reduction of each bucket of gradients starts: as soon as its own gradients are complete."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor


class GradientReduction:
    """Takes over from the hooks of Megatron's ``DistributedDataParallel`` when it starts to reduce a bucket.

    Stock starts one when each of its parameters has had a gradient in the last microbatch's backward. With a split
    backward that comes in two passes, with passes of earlier microbatches between them. So the program says which pass
    is a chunk's last (:meth:`completing`), and from its beginning on each bucket starts that misses no gradient. Of a
    vocabulary that all ranks share, gradients have last passes of their own (:meth:`arriving`).

    Buckets start in stock's order, those that miss gradients longer after the others, and each after those before it.
    So all data-parallel ranks start them alike, though experts may have got tokens on some ranks and none on others.

    With one hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``) a bucket that starts while another is under way keeps
    all computing behind it waiting until that one is done. Then no more of them start in a pass than it takes to have
    all started in the last.

    Args:
        chunks: this rank's model chunks.
        overlapped: whether they are ``DistributedDataParallel`` with overlapped reduction; else nothing is done here.
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
        """Before each pass: it may start buckets again."""
        self._left = self._pace
        self._start()

    def completing(
        self,
        chunk: int,
        late: Collection[Tensor] | None,
        passes_left: int,
        later: Collection[Tensor] = (),
    ) -> None:
        """Before the last pass of a chunk that adds to its layers' gradients.

        Args:
            chunk: of this rank.
            late: the parameters whose gradients it adds to; None for perhaps all.
            passes_left: how many passes of this rank follow it.
            later: those whose last gradients come later still: :meth:`arriving`.
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
        """Before the pass that adds the last to the gradients of ``parameters``, where it is not that of the layers."""
        self._later.difference_update(parameters)

    def complete(self, chunk: int) -> None:
        """After all of these passes, whether or not every parameter got a gradient."""
        for group in self._groups[chunk]:
            self._missing[group].clear()
        self._start()

    def finish(self) -> None:
        """After the last pass: start what has not yet."""
        self._left = len(self._queue)
        self._start()

    def close(self) -> None:
        """Give the buckets back to stock."""
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
