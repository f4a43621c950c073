"""Fused attention of Transformer Engine's compiled half, in plain torch: context parallelism and packed samples use it.

As cuDNN's kernels do, the forward also returns the logarithm of each query's sum of exponentials, and the backward
computes the weights from it and from the output. So the two may belong to more keys than the call has, as in context
parallelism. There is no kernel for dropout, a bias, a window, a softmax offset or FP8.

Parameters are recognised by their types, because their places differ between versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.support.te_types import MissingError, torch_dtype

_MASKS = {"NO_MASK", "CAUSAL_MASK", "PADDING_MASK", "PADDING_CAUSAL_MASK"}


def supported(*parameters: Any) -> bool:
    """Returns whether there is a kernel. Parameters of ``get_fused_attn_backend``, from 2.20 on one object."""
    if len(parameters) == 1:
        each = parameters[0]
        kinds = (each.qkv_layout, each.attn_mask_type, each.bias_type, each.softmax_type)
        dtype, dropout, window = each.qkv_dtype, each.dropout, each.window_size_left
    else:
        at = [i for i, each in enumerate(parameters) if type(each).__name__.startswith("NVTE_")]
        kinds, dtype = tuple(parameters[i] for i in at), parameters[at[0] - 1]
        # Between the two: heads, groups of heads, two lengths and two sizes of a head.
        dropout, window = parameters[at[-1] + 1], parameters[at[-1] + 8]
    known = _MASKS | {"NO_BIAS", "VANILLA_SOFTMAX"}
    layout, *others = (each.name.removeprefix("NVTE_") for each in kinds)
    plain = all(name in known for name in others) and dropout == 0 and window == -1
    packed = any("PADDING" in name for name in others)
    usable = _format(layout) == "THD" if packed else _format(layout) in ("SBHD", "BSHD")
    return plain and usable and torch_dtype(dtype) in (torch.bfloat16, torch.float16)


def fused_attn_fwd(*parameters: Any) -> list[Any]:
    """Returns the output, the logarithms (b, heads, s, 1), or (t, heads, 1) of packed samples, and a random state."""
    call, (q, k, v) = _read(parameters, 3)
    scale = float(parameters[3])
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    logarithms = _logarithms(call, q)
    for one in _sequences(call, q, k, v, out, queries=(0, 3), sums=logarithms):
        query, key, value, into = one.tensors
        scores = _scores(call, query, key, scale)
        one.sums.copy_(scores.logsumexp(-1))
        weights = torch.exp(scores - one.sums[..., None])
        into.copy_(torch.einsum("hqk,khd->qhd", weights, _each_head(value, query)))
    return [out, logarithms, torch.zeros(2, dtype=torch.int64)]


def fused_attn_bwd(*parameters: Any) -> list[Any]:
    """Gradients of query, key and value, and none of a bias."""
    call, (q, k, v, out, d_out) = _read(parameters, 5)
    scale = float(parameters[2])
    logarithms = next(each for each in parameters if isinstance(each, list))[0]
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    tensors = (q, k, v, out, d_out, dq, dk, dv)
    for one in _sequences(call, *tensors, queries=(0, 3, 4, 5), sums=logarithms):
        query, key, value, output, gradient, d_query, d_key, d_value = one.tensors
        weights = torch.exp(_scores(call, query, key, scale) - one.sums[..., None])
        gradient = gradient.float()
        d_weights = torch.einsum("qhd,khd->hqk", gradient, _each_head(value, query))
        own = (gradient * output.float()).sum(-1).t()
        d_scores = weights * (d_weights - own[..., None]) * scale
        d_query.copy_(torch.einsum("hqk,khd->qhd", d_scores, _each_head(key, query)))
        d_key.copy_(_each_group(torch.einsum("hqk,qhd->khd", d_scores, query.float()), key))
        d_value.copy_(_each_group(torch.einsum("hqk,qhd->khd", weights, gradient), value))
    return [dq, dk, dv, None]


class _Call(NamedTuple):
    """Layout and mask of a call, and for packed samples where each begins and how long it is: of queries, of keys."""

    format: str
    causal: bool
    starts: list[list[int]]
    lengths: list[list[int]]


class _Sequence(NamedTuple):
    """Views of one sequence: tensors (tokens, heads, d), and logarithms (heads, tokens)."""

    tensors: list[Tensor]
    sums: Tensor


def _read(parameters: Sequence[Any], count: int) -> tuple[_Call, Sequence[Tensor]]:
    """Returns the call and its first ``count`` tensors from the queries on."""
    layout, mask = (
        next(each.name.removeprefix("NVTE_") for each in parameters if type(each).__name__ == name)
        for name in ("NVTE_QKV_Layout", "NVTE_Mask_Type")
    )
    form = _format(layout)
    if form not in ("SBHD", "BSHD", "THD") or mask not in _MASKS:
        raise MissingError(f"fused attention of {layout} with {mask}")
    at = next(i for i, each in enumerate(parameters) if isinstance(each, Tensor))
    bounds, tensors = parameters[at : at + 2], parameters[at + 2 : at + 2 + count]
    # The bounds with padding follow the tensors, their data types, and a backward's list.
    rest = [each for each in parameters[at + 2 + count :] if each is None or isinstance(each, Tensor)][:2]
    padded = [own if each is None else each for own, each in zip(bounds, rest, strict=True)]
    starts, lengths = [each[:-1].tolist() for each in padded], [each.diff().tolist() for each in bounds]
    return _Call(form, "CAUSAL" in mask, starts, lengths), tensors


def _format(layout: str) -> str:
    """Order of dimensions that queries, keys and values share, or "" if they do not share one."""
    found = {"".join(filter(str.isalpha, part)) for part in layout.split("_")}
    return found.pop() if len(found) == 1 else ""


def _logarithms(call: _Call, q: Tensor) -> Tensor:
    if call.format == "THD":
        return torch.zeros(*q.shape[:2], 1)
    sequence, batch = q.shape[:2] if call.format == "SBHD" else q.shape[1::-1]
    return torch.zeros(batch, q.shape[2], sequence, 1)


def _sequences(call: _Call, *tensors: Tensor, queries: Sequence[int], sums: Tensor) -> Iterator[_Sequence]:
    """Views of each sequence. ``queries`` are the tensors that have a row for each query; others have one for a key."""
    if call.format == "THD":
        for at in range(len(call.starts[0])):
            rows = [slice(starts[at], starts[at] + lengths[at]) for starts, lengths in zip(*call[2:], strict=True)]
            views = [tensor[rows[0 if i in queries else 1]] for i, tensor in enumerate(tensors)]
            if len(views[0]):
                yield _Sequence(views, sums.view(*sums.shape[:2])[rows[0]].t())
        return
    across = int(call.format == "SBHD")
    for at in range(tensors[0].shape[across]):
        yield _Sequence([tensor.select(across, at) for tensor in tensors], sums[at].flatten(1))


def _scores(call: _Call, query: Tensor, key: Tensor, scale: float) -> Tensor:
    """(heads, queries, keys) from (queries, heads, d) and (keys, groups, d)."""
    scores = torch.einsum("qhd,khd->hqk", query.float(), _each_head(key, query)) * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -torch.inf) if call.causal else scores


def _each_head(tensor: Tensor, query: Tensor) -> Tensor:
    """Repeats each group of keys or values for the heads that share it."""
    return tensor.float().repeat_interleave(query.shape[1] // tensor.shape[1], dim=1)


def _each_group(gradient: Tensor, tensor: Tensor) -> Tensor:
    """Adds what heads gave that share a group."""
    rows, groups, d = tensor.shape
    return gradient.view(rows, groups, -1, d).sum(2)


KERNELS = {"fused_attn_fwd": fused_attn_fwd, "fused_attn_bwd": fused_attn_bwd}
