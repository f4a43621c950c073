"""Mamba-2 (``M``) and gated delta net (``G``): estimates of both.

Their kernels run on no CPU, and no job on a GPU has measured these estimates. What a kernel keeps is read from what its
autograd function saves: ``MambaSplitConv1dScanCombinedFn`` and ``LayerNormFn`` of mamba_ssm 2.2;
``CausalConv1dFunction``, ``L2NormFunction`` and ``ChunkGatedDeltaRuleFunction`` of flash-linear-attention 0.4, with
what torch.compile keeps around them. All else was counted in jobs of Megatron's own layers on a CPU, with stand-ins
for these kernels (``tests/integration/kernel_mixers.py``). FLOPs of a scan are those that Megatron logs
(``num_floating_point_operations``).
"""

from __future__ import annotations

from typing import NamedTuple

from megatron.schedules.estimate.build import Build
from megatron.schedules.estimate.parts import (
    SINGLE,
    Count,
    Kept,
    Layer,
    LinearShape,
    PartWork,
    Symbol,
    around,
    around_part,
    for_rows,
    into_linear,
    norm_parameters,
    weights,
)
from megatron.schedules.estimate.shape import DeltaNet, Mamba

# Both kernels compute their states again in the backward, and both gradients of each product.
_BACKWARD = 2.5
# Tokens of a chunk, between which states are written to memory: Megatron's for Mamba, the library's for delta nets.
_CHUNK, _DELTA_CHUNK = 128, 64
# Width of Mamba's convolution.
_REACH = 4
_KERNELS = 10


class _Widths(NamedTuple):
    """Widths on one tensor-parallel rank.

    Args:
        into: output of the first linear.
        convolved: part of it that passes through the convolution.
        inner: input of the last linear.
        heads: heads, which each have two or three numbers a token.
    """

    into: float
    convolved: float
    inner: float
    heads: float


def _linears(build: Build, widths: _Widths) -> tuple[LinearShape, LinearShape]:
    hidden = build.shape.hidden
    return LinearShape(hidden, widths.into, name="in_proj"), LinearShape(widths.inner, hidden, name="out_proj")


def _work(build: Build, widths: _Widths, flops: float, touched: float) -> PartWork:
    """Work of a part whose scan has so many ``flops``, and touches so many bytes forward."""
    moved = around(build) + touched, around(build) + _BACKWARD * touched
    return PartWork(_linears(build, widths), scan=(flops, _BACKWARD * flops), moved=moved, kernels=_KERNELS)


def _around(build: Build, operand: float, widths: _Widths, inside: float) -> Layer:
    """Bytes of a part that keeps ``inside`` bytes between its linears, without the last one's input."""
    kept = inside + operand * widths.inner
    mixer = Kept(kept, operand * widths.into + for_rows(build, operand, widths.inner))
    return {**around_part(build, into_linear(build, operand)), "mixer": mixer}


def _mamba_sizes(build: Build) -> Mamba:
    assert build.shape.mamba is not None, "a layer is a state-space layer"
    return build.shape.mamba


def _mamba(build: Build) -> _Widths:
    mamba = _mamba_sizes(build)
    heads, shared = mamba.heads / build.tensor, mamba.groups * mamba.state / build.tensor
    inner = heads * mamba.head
    return _Widths(2 * inner + 2 * shared + heads, inner + 2 * shared, inner, heads)


def _mamba_work(build: Build) -> PartWork:
    widths, mamba = _mamba(build), _mamba_sizes(build)
    states = widths.inner * mamba.state
    # The convolution's input and output, the scan's inputs and outputs with the gate, the norm; states in single
    # precision, written and read.
    touched = 2.0 * (3 * widths.convolved + 6 * widths.inner) + 2 * SINGLE * states / _CHUNK
    return _work(build, widths, 7.0 * states, touched)


def _mamba_parameters(build: Build) -> Count:
    widths = _mamba(build)
    convolution = (_REACH + 1) * widths.convolved  # with its bias
    alone = 3 * widths.heads + widths.inner  # steps, decays and skips of each head; the norm's scale
    return Count(norm_parameters(build, build.shape.hidden) + weights(_linears(build, widths)) + convolution + alone)


def _mamba_activations(build: Build, operand: float) -> Layer:
    """The scan keeps its input and its output before the gate, the norm its input and a number for each group."""
    widths, mamba = _mamba(build), _mamba_sizes(build)
    inside = build.number * (widths.into + 2 * widths.inner) + SINGLE * mamba.groups / build.tensor
    return _around(build, operand, widths, inside)


def _delta_sizes(build: Build) -> DeltaNet:
    assert build.shape.delta is not None, "a layer is a gated delta net"
    return build.shape.delta


def _delta(build: Build) -> _Widths:
    delta = _delta_sizes(build)
    keys, values = delta.keys * delta.key / build.tensor, delta.values * delta.value / build.tensor
    heads = delta.values / build.tensor
    return _Widths(2 * keys + 2 * values + 2 * heads, 2 * keys + values, values, heads)


def _delta_work(build: Build) -> PartWork:
    widths, delta = _delta(build), _delta_sizes(build)
    # Megatron's logs have the square of the width of a value.
    flops = 2 * delta.reach * widths.convolved + 8 * widths.heads * delta.key * delta.value
    expanded, states = widths.heads * delta.key, widths.inner * delta.key
    touched = 2.0 * (3 * widths.convolved + 8 * expanded + 10 * widths.inner) + 2 * SINGLE * states / _DELTA_CHUNK
    return _work(build, widths, flops, touched)


def _delta_parameters(build: Build) -> Count:
    widths, delta = _delta(build), _delta_sizes(build)
    alone = delta.reach * widths.convolved + 2 * widths.heads + norm_parameters(build, delta.value)
    return Count(norm_parameters(build, build.shape.hidden) + weights(_linears(build, widths)) + alone)


def _delta_activations(build: Build, operand: float) -> Layer:
    """The convolution keeps its input, queries and keys their norm, the rule its inputs and a chunk's inverse.

    The last norm keeps its input, and the gate after it both of its factors.
    """
    widths, delta = _delta(build), _delta_sizes(build)
    normed = widths.convolved - widths.inner
    rule = 2 * widths.heads * delta.key + widths.inner + _DELTA_CHUNK * widths.heads
    inside = build.number * (widths.convolved + normed + rule + 3 * widths.inner)
    # Decays, their sums in a chunk and what they are made of; norms' roots.
    inside += 4 * SINGLE * widths.heads + SINGLE * (2 * delta.keys / build.tensor + widths.heads)
    return _around(build, operand, widths, inside)


MAMBA = Symbol("Mamba", _mamba_work, _mamba_parameters, _mamba_activations)
DELTA_NET = Symbol("gated delta net", _delta_work, _delta_parameters, _delta_activations)
