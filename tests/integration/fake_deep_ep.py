"""Stands in for DeepEP and HybridEP where there is no GPU: moves tokens over gloo, by the interfaces that stock calls.

What a message brings is NaN until the device waits for it, so that whoever reads it before gets no loss.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Rows = list[Tensor]
"""For each rank, indices of the rows that go there."""


class EventHandle:
    """An event that has happened, or what happens when the device waits for it."""

    def __init__(self, arrive: Callable[[], None] | None = None) -> None:
        self._arrive = arrive

    def current_stream_wait(self) -> None:
        arrive, self._arrive = self._arrive, None
        if arrive is not None:
            arrive()


class EventOverlap:
    """What stock holds of an event."""

    def __init__(self, event: EventHandle | None = None) -> None:
        self.event = event

    def current_stream_wait(self) -> None:
        assert self.event is not None
        self.event.current_stream_wait()


class Buffer:
    """A token goes once to each rank that has one of its experts, and comes back summed over these ranks."""

    def __init__(self, group: Any, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def set_num_sms(number: int) -> None: ...

    @staticmethod
    def get_dispatch_config(ranks: int) -> Any:
        hint = {f"get_{link}_buffer_size_hint": lambda hidden_bytes, ranks: hidden_bytes for link in ("nvl", "rdma")}
        return SimpleNamespace(**hint)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int, previous_event: Any, **named: bool) -> Any:
        assert isinstance(previous_event, EventOverlap) and all(named.values())
        ranks = self.group.size()
        routes = torch.nn.functional.one_hot(topk_idx, num_experts).sum(1)
        in_rank = routes.view(len(topk_idx), ranks, -1).sum(2) > 0
        return in_rank.sum(0), None, routes.sum(0), in_rank, EventOverlap(EventHandle())

    def dispatch(
        self,
        x: Tensor,
        handle: Any = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        **more: Any,
    ) -> tuple[Any, ...]:
        assert isinstance(previous_event, EventOverlap) and async_finish and allocate_on_comm_stream
        if handle is not None:
            rows, counts, _ = handle
            received, event = _sent(self.group, x, rows, counts)
            return received, None, None, None, None, event
        assert topk_idx is not None and topk_weights is not None and is_token_in_rank is not None
        assert num_tokens_per_expert is not None
        rows = [column.nonzero().flatten() for column in is_token_in_rank.unbind(1)]
        counts = _told(self.group, [len(each) for each in rows])  # the host waits here, as DeepEP's does
        received, event = _sent(self.group, x, rows, counts)
        indices, weights = (_waited(_sent(self.group, each, rows, counts)) for each in (topk_idx.float(), topk_weights))
        local = len(num_tokens_per_expert) // self.group.size()
        indices = indices.long() - self.group.rank() * local
        elsewhere = (indices < 0) | (indices >= local)
        indices, weights = indices.masked_fill(elsewhere, -1), weights.masked_fill(elsewhere, 0.0)
        numbers = [int((indices == expert).sum()) for expert in range(local)]
        return received, indices, weights, numbers, (rows, counts, len(x)), event

    def combine(
        self,
        x: Tensor,
        handle: Any,
        topk_weights: Tensor | None = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        assert isinstance(previous_event, EventOverlap) and async_finish and allocate_on_comm_stream
        summed, event = _returned(self.group, x, *handle)
        weights = None if topk_weights is None else _waited(_returned(self.group, topk_weights, *handle))
        return summed, weights, event


class _Places(NamedTuple):
    """Where tokens of all ranks go on this one, if their number has a limit. The host knows none of it.

    Args:
        rows: row of each token for each expert of this rank, shape (tokens, experts); ``limit`` if it has none.
        limit: number of rows.
        too_many: 1 if tokens were dropped, otherwise 0.
    """

    rows: Tensor
    limit: int
    too_many: Tensor


class HybridEPBuffer:
    """A token goes to each of its experts, sorted by expert, and comes back summed. The current stream waits.

    With a limit (``num_permuted_tokens``) shapes are fixed, and what the host does depends on no data.
    """

    def __init__(self, group: Any, **sizes: Any) -> None:
        self.group = group

    def _gathered(self, x: Tensor) -> Tensor:
        """Those of all ranks, shape (ranks, ...)."""
        whole = x.new_empty((self.group.size() * len(x), *x.shape[1:]))
        dist.all_gather_into_tensor(whole, x.contiguous(), group=self.group)
        return whole.unflatten(0, (self.group.size(), -1))

    def _placed(self, routing_map: Tensor, experts: int, limit: int) -> tuple[_Places, Tensor]:
        """Places, and how many tokens each expert of this rank has, without those that were dropped."""
        first = self.group.rank() * experts
        own = self._gathered(routing_map.to(torch.int64)).flatten(0, 1)[:, first : first + experts]
        numbers = own.sum(0)
        rows = numbers.cumsum(0) - numbers + own.cumsum(0) - 1
        too_many = (numbers.sum() > limit).to(torch.int32)
        left = torch.diff(numbers.cumsum(0).clamp(max=limit), prepend=torch.zeros_like(numbers[:1]))
        return _Places(torch.where((own > 0) & (rows < limit), rows, limit), limit, too_many), left

    def _into(self, x: Tensor, places: _Places) -> Tensor:
        """Tokens of all ranks, each in the rows of its experts here; other rows are zero."""
        tokens = self._gathered(x).flatten(0, 1)
        result = tokens.new_zeros((places.limit + 1, *tokens.shape[1:]))
        for rows in places.rows.unbind(1):
            result[rows] = tokens
        return result[:-1]

    def _back(self, x: Tensor, places: _Places) -> Tensor:
        """This rank's tokens, each summed over its experts."""
        padded = torch.cat([x, torch.zeros_like(x[:1])])
        summed = torch.stack([padded[rows].float() for rows in places.rows.unbind(1)]).sum(0)
        parts = self._gathered(summed).sum(0)
        return parts.unflatten(0, (self.group.size(), -1))[self.group.rank()].to(x.dtype)

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        handle: Any = None,
        num_of_experts_per_rank: int = 0,
        num_permuted_tokens: int | None = None,
        **more: Any,
    ) -> tuple[Any, ...]:
        if handle is not None and isinstance(handle[0], _Places):
            return self._into(hidden, handle[0]), None, None, None, handle
        if handle is None and isinstance(num_permuted_tokens, int):
            assert routing_map is not None and probs is not None
            placed, sizes = self._placed(routing_map, num_of_experts_per_rank, num_permuted_tokens)
            first = self.group.rank() * num_of_experts_per_rank
            every = self._gathered(probs).flatten(0, 1)[:, first : first + num_of_experts_per_rank]
            chances = every.new_zeros(placed.limit + 1)
            for column, of_rows in enumerate(placed.rows.unbind(1)):
                chances[of_rows] = every[:, column]
            return self._into(hidden, placed), chances[:-1], None, sizes, (placed, placed.too_many)
        numbers = places = None
        if handle is None:
            assert routing_map is not None and probs is not None
            pairs = routing_map.T.nonzero()  # (expert, token), by expert
            to_rank = pairs[:, 0] // num_of_experts_per_rank
            places = [pairs[to_rank == rank] for rank in range(self.group.size())]
            rows = [each[:, 1] for each in places]
            counts = _told(self.group, [len(each) for each in rows])
            experts = _waited(_sent(self.group, pairs[:, :1].float(), _in_order(rows), counts))
            by_expert = experts.flatten().argsort(stable=True)
            numbers = experts.flatten().long().bincount(minlength=num_of_experts_per_rank * self.group.size())
            first = self.group.rank() * num_of_experts_per_rank
            numbers = numbers[first : first + num_of_experts_per_rank]
            handle = rows, counts, len(hidden), by_expert, places, routing_map.shape
        rows, counts, _, by_expert, _, _ = handle
        received = _waited(_sent(self.group, hidden, rows, counts))[by_expert]
        weights = None
        if places is not None and probs is not None:
            chosen = torch.cat([probs[each[:, 1], each[:, 0]] for each in places])[:, None]
            weights = _waited(_sent(self.group, chosen, _in_order(rows), counts))[by_expert].flatten()
        return received, weights, None, numbers, handle

    def combine_with_unpermute(
        self, *, hidden: Tensor, probs: Tensor | None = None, handle: Any = None, **more: Any
    ) -> tuple[Any, ...]:
        if isinstance(handle[0], _Places):
            return self._back(hidden, handle[0]), None if probs is None else self._chances(probs, handle[0])
        rows, counts, tokens, by_expert, places, shape = handle
        back = by_expert.argsort()
        summed = _waited(_returned(self.group, hidden[back], rows, counts, tokens))
        weights = None
        if probs is not None:
            returned = _returned(self.group, probs[back][:, None], _in_order(rows), counts, sum(map(len, rows)))
            found = _waited(returned).flatten()
            weights, pairs = found.new_zeros(shape), torch.cat(places)
            weights[pairs[:, 1], pairs[:, 0]] = found
        return summed, weights

    def _chances(self, probs: Tensor, places: _Places) -> Tensor:
        """Gradients of the weights of this rank's tokens for all experts."""
        padded = torch.cat([probs, torch.zeros_like(probs[:1])])
        parts = self._gathered(padded[places.rows])  # (ranks, tokens of all ranks, experts of a rank)
        own = parts.unflatten(1, (self.group.size(), -1))[:, self.group.rank()]
        return own.transpose(0, 1).flatten(1)


def put_in() -> None:
    """Lets stock find both libraries in this process, before this package's hooks are installed."""
    found, utils = ModuleType("deep_ep"), ModuleType("deep_ep.utils")
    vars(found).update(Buffer=Buffer, HybridEPBuffer=HybridEPBuffer, utils=utils)
    vars(utils).update(EventHandle=EventHandle, EventOverlap=EventOverlap)
    sys.modules |= {"deep_ep": found, "deep_ep.utils": utils}
    from megatron.core.transformer.moe import fused_a2a, token_dispatcher

    importlib.reload(fused_a2a)
    for name in ("fused_dispatch", "fused_combine", "set_deepep_num_sms", "hybrid_ep_dispatch", "hybrid_ep_combine"):
        setattr(token_dispatcher, name, getattr(fused_a2a, name))


def _told(group: Any, counts: list[int]) -> list[int]:
    """How many rows each rank sends here."""
    found = torch.empty(len(counts), dtype=torch.long)
    dist.all_to_all_single(found, torch.tensor(counts), group=group)
    return found.tolist()


def _in_order(rows: Rows) -> Rows:
    """As many rows for each rank as in ``rows``, one after another."""
    sizes = [len(each) for each in rows]
    return list(torch.arange(sum(sizes)).split(sizes))


def _exchanged(group: Any, rows: Tensor, sent: list[int], received: list[int]) -> tuple[Tensor, Any]:
    arriving = rows.new_empty((sum(received), *rows.shape[1:]))
    return arriving, dist.all_to_all_single(arriving, rows.contiguous(), received, sent, group=group, async_op=True)


def _sent(group: Any, x: Tensor, rows: Rows, counts: list[int]) -> tuple[Tensor, EventOverlap]:
    """Sends ``rows`` of ``x`` to the ranks; there are ``counts`` from each."""
    x = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32) if not x.is_floating_point() else x
    arriving, work = _exchanged(group, x[torch.cat(rows)], [len(each) for each in rows], counts)
    result = torch.full_like(arriving, torch.nan)

    def arrive() -> None:
        work.wait()
        result.copy_(arriving)

    return result, EventOverlap(EventHandle(arrive))


def _returned(group: Any, x: Tensor, rows: Rows, counts: list[int], tokens: int) -> tuple[Tensor, EventOverlap]:
    """Sends back what came as ``counts`` rows from each rank; each of ``tokens`` is summed in the order of ranks."""
    arriving, work = _exchanged(group, x, counts, [len(each) for each in rows])
    result = x.new_full((tokens, *x.shape[1:]), torch.nan)

    def arrive() -> None:
        work.wait()
        result.zero_().index_add_(0, torch.cat(rows), arriving)

    return result, EventOverlap(EventHandle(arrive))


def _waited(message: tuple[Tensor, EventOverlap]) -> Tensor:
    message[1].current_stream_wait()
    return message[0]
