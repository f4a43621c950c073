"""Hides the messages of experts behind weight gradients.

Stock's dispatchers send tokens to their experts and back, and wait for each message in F and in I. Here such a message
starts, this rank computes weight gradients that are due, and then the device waits. W does the rest. Every rank decides
by itself how many: the gradients computed here need no other rank.

Based on megatron-core 0.19.2, ``transformer/moe/token_dispatcher.py`` and ``transformer/moe/fused_a2a.py``, on DeepEP's
``Buffer`` and on its ``HybridEPBuffer``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.parallel_state import get_global_memory_buffer
from torch import Tensor
from torch.distributed import ProcessGroup

SplitSizes = list[int] | None
"""Rows to or from each rank; None if equal."""

RunAhead = Callable[[int], Callable[[], None]]
"""Computes weight gradients that are due, behind a message of so many bytes; returns what to call after the wait."""

# Settings with which stock hides these messages, in arguments and in configurations. Its schedule then runs parts of
# layers of two microbatches at a time, and asks for other settings with them.
STOCKS_OWN = ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "ep_overlap_early_attn_memory_release")


def reset_stocks_own(settings: Any) -> list[str]:
    """Resets stock's own settings for hiding messages, of arguments or a configuration; returns those that were set."""
    names = [name for name in STOCKS_OWN if getattr(settings, name, False)]
    for name in names:
        setattr(settings, name, False)
    return names


class MessageWatch(NamedTuple):
    """Measures messages.

    Args:
        message: called when a message starts. What it returns is called when weight gradients behind the message have
            been computed, and again when it has arrived.
        exposes: whether no weight gradients run behind messages, so that passes can be measured without them.
    """

    message: Callable[[], Callable[[], None]]
    exposes: bool


def _nothing() -> None:
    """Called when a message has arrived that nobody measures."""


EXPOSED = MessageWatch(lambda: _nothing, exposes=True)
"""Runs nothing behind messages, and measures none."""


class ExpertMessages:
    """Messages of experts in this process, and what runs behind them.

    The methods that replace stock's functions take the function and its arguments. They call it outside :meth:`hidden`,
    and if there is one rank. Ranks of ``group`` share the experts. Rows are (rows, ...), and sizes count those of each
    rank.
    """

    def __init__(self) -> None:
        # Plain, not thread-local: on a GPU a backward runs in a thread of its own.
        self._run_ahead: RunAhead | None = None
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def hidden(self, run_ahead: Callable[[int], None], watch: MessageWatch | None = None) -> Iterator[None]:
        """Runs ``run_ahead`` behind each message inside the block.

        Args:
            run_ahead: computes weight gradients that are due, behind a message of so many bytes.
            watch: measures the messages; may be None.
        """

        def watched(sent: int) -> Callable[[], None]:
            if watch is None:
                run_ahead(sent)
                return _nothing
            mark = watch.message()
            if not watch.exposes:
                run_ahead(sent)
            mark()
            return mark

        self._run_ahead = watched
        try:
            yield
        finally:
            self._run_ahead = None

    def send(
        self,
        stock: Callable[..., Tensor],
        group: ProcessGroup,
        rows: Tensor,
        output_split_sizes_: SplitSizes = None,
        input_split_sizes: SplitSizes = None,
        use_nccl_stream: bool = False,
    ) -> Tensor:
        """Sends rows to and receives rows from each rank of ``group``, as stock's ``all_to_all`` does."""
        if self._run_ahead is None or group.size() == 1:
            return stock(group, rows, output_split_sizes_, input_split_sizes, use_nccl_stream)
        received, sent = output_split_sizes_, input_split_sizes
        there = partial(_exchanged, group=group, received=received, sent=sent, run_ahead=self._run_ahead)
        back = partial(_exchanged, group=group, received=sent, sent=received, run_ahead=self._run_ahead)
        moved: Tensor = _Moved.apply(rows, there, back)
        return moved

    def gather(
        self,
        stock: Callable[..., Tensor],
        rows: Tensor,
        tensor_parallel_output_grad: bool = True,
        group: ProcessGroup | None = None,
        output_split_sizes: SplitSizes = None,
        use_global_buffer: bool = False,
    ) -> Tensor:
        """Gathers the rows of all ranks of ``group``, as ``gather_from_sequence_parallel_region`` does.

        Stock's function also gathers what has no gradient: routes and counts of tokens. ``tensor_parallel_output_grad``
        is always true for tokens. With ``use_global_buffer`` the result is in stock's buffer.
        """
        if self._run_ahead is None or group is None or group.size() == 1 or not rows.is_floating_point():
            return stock(rows, tensor_parallel_output_grad, group, output_split_sizes, use_global_buffer)
        how = group, output_split_sizes, use_global_buffer, self._run_ahead
        whole: Tensor = _Moved.apply(rows, lambda rows: _gathered(rows, *how), lambda rows: _scattered(rows, *how))
        return whole

    def scatter(
        self,
        stock: Callable[..., Tensor],
        rows: Tensor,
        group: ProcessGroup | None = None,
        input_split_sizes: SplitSizes = None,
        use_global_buffer: bool = False,
    ) -> Tensor:
        """Sums rows over ``group`` and returns this rank's, as ``reduce_scatter_to_sequence_parallel_region`` does."""
        if self._run_ahead is None or group is None or group.size() == 1:
            return stock(rows, group, input_split_sizes, use_global_buffer)
        how = group, input_split_sizes, use_global_buffer, self._run_ahead
        part: Tensor = _Moved.apply(rows, lambda rows: _scattered(rows, *how), lambda rows: _gathered(rows, *how))
        return part

    def through(self, buffer: Any) -> Any:
        """Returns DeepEP's ``buffer``, or one that runs weight gradients before stock waits for its messages."""
        return buffer if self._run_ahead is None else _Buffer(buffer, self._run_ahead)

    def on_own_stream(self, call: Callable[[], tuple[Any, ...]], sent: int) -> tuple[Any, ...]:
        """Calls a message of HybridEP of ``sent`` bytes, which runs on the current stream: here on one of its own.

        The host may wait inside the call until the message has ended, so weight gradients are queued before it. The
        message waits for none of them. What it makes needs no ``record_stream``: only the next message uses that memory
        again, after its stream has waited for whatever still reads it.
        """
        if self._run_ahead is None:
            return call()
        if self._stream is None:
            self._stream = torch.cuda.Stream(priority=-1)  # ahead of the blocks of weight gradients
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        arrived = self._run_ahead(sent)
        with torch.cuda.stream(self._stream):
            results = call()
        current.wait_stream(self._stream)
        arrived()
        return results


class HybridBuffer:
    """HybridEP's buffer, whose messages overlap with weight gradients.

    Args:
        buffer: HybridEP's own.
        messages: what runs behind them.
    """

    def __init__(self, buffer: Any, messages: ExpertMessages) -> None:
        self._buffer, self._messages = buffer, messages
        self._received = 0  # bytes that the last dispatch brought; the next one's are known when it has ended

    def dispatch_with_permute(self, *, hidden: Tensor, **named: Any) -> tuple[Any, ...]:
        call = partial(self._buffer.dispatch_with_permute, hidden=hidden, **named)
        results = self._messages.on_own_stream(call, max(hidden.nbytes, self._received))
        self._received = results[0].nbytes
        return results

    def combine_with_unpermute(self, *, hidden: Tensor, **named: Any) -> tuple[Any, ...]:
        call = partial(self._buffer.combine_with_unpermute, hidden=hidden, **named)
        return self._messages.on_own_stream(call, hidden.nbytes)


class _Buffer:
    """DeepEP's buffer, whose events run weight gradients before they let the device wait."""

    def __init__(self, buffer: Any, run_ahead: RunAhead) -> None:
        self._buffer, self._run_ahead = buffer, run_ahead

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffer, name)

    def dispatch(self, rows: Tensor, **named: Any) -> tuple[Any, ...]:
        return self._started(rows, *self._buffer.dispatch(rows, **named))

    def combine(self, rows: Tensor, handle: Any, **named: Any) -> tuple[Any, ...]:
        return self._started(rows, *self._buffer.combine(rows, handle, **named))

    def _started(self, rows: Tensor, received: Tensor, *more: Any) -> tuple[Any, ...]:
        *results, event = more
        return received, *results, _MessageEnd(event, partial(self._run_ahead, _bytes(rows, received)))


class _MessageEnd:
    """End of a message that has started."""

    def __init__(self, event: Any, run_ahead: Callable[[], Callable[[], None]]) -> None:
        self._event, self._run_ahead = event, run_ahead

    def current_stream_wait(self) -> None:
        arrived = self._run_ahead()
        self._event.current_stream_wait()
        arrived()


class _Moved(torch.autograd.Function):
    """Moves rows in the forward, and their gradients the other way in the backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(gradient), None, None


def _exchanged(
    rows: Tensor, group: ProcessGroup, received: SplitSizes, sent: SplitSizes, run_ahead: RunAhead
) -> Tensor:
    rows = rows.contiguous()
    result = rows.new_empty((len(rows) if received is None else sum(received), *rows.shape[1:]))
    start = partial(torch.distributed.all_to_all_single, result, rows, received, sent, group=group)
    return _behind(start, rows, result, run_ahead)


def _gathered(rows: Tensor, group: ProcessGroup, sizes: SplitSizes, buffered: bool, run_ahead: RunAhead) -> Tensor:
    rows = rows.contiguous()
    result = _empty(rows, len(rows) * group.size() if sizes is None else sum(sizes), buffered)
    if sizes is None:
        start = partial(torch.distributed.all_gather_into_tensor, result, rows, group=group)
    else:
        start = partial(torch.distributed.all_gather, list(result.split(list(sizes))), rows, group=group)
    return _behind(start, rows, result, run_ahead)


def _scattered(rows: Tensor, group: ProcessGroup, sizes: SplitSizes, buffered: bool, run_ahead: RunAhead) -> Tensor:
    rows = rows.contiguous()
    result = _empty(rows, len(rows) // group.size() if sizes is None else sizes[group.rank()], buffered)
    if sizes is None:
        start = partial(torch.distributed.reduce_scatter_tensor, result, rows, group=group)
    else:
        start = partial(torch.distributed.reduce_scatter, result, list(rows.split(list(sizes))), group=group)
    return _behind(start, rows, result, run_ahead)


def _empty(rows: Tensor, count: int, buffered: bool) -> Tensor:
    """Returns ``count`` rows without values, in the buffer that stock's linears use too if ``buffered``."""
    shape = (count, *rows.shape[1:])
    if not buffered:
        return rows.new_empty(shape)
    buffer: Tensor = get_global_memory_buffer().get_tensor(shape, rows.dtype, "mpu")
    return buffer


def _behind(start: Callable[..., Any], rows: Tensor, result: Tensor, run_ahead: RunAhead) -> Tensor:
    """Starts a message, computes weight gradients, and lets the device wait for the message."""
    message = start(async_op=True)
    arrived = run_ahead(_bytes(rows, result))
    message.wait()
    arrived()
    return result


def _bytes(sent: Tensor, received: Tensor) -> int:
    return max(sent.nbytes, received.nbytes)
