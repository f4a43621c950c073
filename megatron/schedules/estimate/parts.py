"""What the parts of a layer are estimated with: their work, activations and parameters, and what many have in common.

All are of one tensor-parallel rank; work and activations are for one token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron.schedules.estimate.build import Adapters, Build

SINGLE = 4.0
"""Bytes of a number in single precision."""


class LinearShape(NamedTuple):
    """A linear.

    Args:
        inner, out: widths of its input and its output.
        rows: rows per token.
        parts: number of separate products that share the rows, such as experts.
        name: Megatron's, where it may have an adapter.
    """

    inner: float
    out: float
    rows: float = 1.0
    parts: float = 1.0
    name: str = ""

    @property
    def flops(self) -> float:
        """FLOPs per token, forward."""
        return 2.0 * self.rows * self.inner * self.out

    @property
    def weights(self) -> float:
        """Number of its weights."""
        return self.parts * self.inner * self.out


@dataclass(frozen=True)
class PartWork:
    """Work of one part, as in arXiv 2205.05198, appendix A.

    Args:
        linears: its linears.
        scores: FLOPs of F and of I in what grows with the length of a sequence: attention itself.
        scan: FLOPs of both in what mixes tokens in another way.
        moved: bytes that F and I move outside products: norms, dropouts, sums, activation functions.
        kernels: number of kernels that do so.
        joined: number of linears, from the first on, whose weight gradients I computes.
        routed: bytes sent to all chosen experts, one way, those of the same rank included.
        modules: FLOPs, in linears and elsewhere, of each module that Megatron can recompute alone, by its name.
    """

    linears: tuple[LinearShape, ...]
    scores: tuple[float, float] = (0.0, 0.0)
    scan: tuple[float, float] = (0.0, 0.0)
    moved: tuple[float, float] = (0.0, 0.0)
    kernels: int = 3
    joined: int = 0
    routed: float = 0.0
    modules: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def flops(self) -> float:
        """FLOPs per token, forward."""
        return self.mixing[0] + flops(self.linears)

    @property
    def mixing(self) -> tuple[float, float]:
        """FLOPs of F and of I outside linears."""
        return self.scores[0] + self.scan[0], self.scores[1] + self.scan[1]


class Kept(NamedTuple):
    """Bytes of activations per token.

    Args:
        forward: bytes from F to I.
        weights: bytes from I to W.
    """

    forward: float = 0.0
    weights: float = 0.0

    def plus(self, other: Kept) -> Kept:
        """Sum of both."""
        return Kept(self.forward + other.forward, self.weights + other.weights)


Layer = Mapping[str, Kept]
"""Activations of a layer or of a part, in pieces; those that Megatron can recompute alone have its name for them."""


class Count(NamedTuple):
    """Number of parameters.

    Args:
        dense: those that are trained, without the next.
        expert: those of routed experts, which have their own data-parallel ranks.
        quantized: those of all that have copies in FP8.
        primary: those that are stored in FP8 only.
        frozen: those that are not trained.
    """

    dense: float = 0.0
    expert: float = 0.0
    quantized: float = 0.0
    primary: float = 0.0
    frozen: float = 0.0

    def plus(self, other: Count) -> Count:
        """Sum of both."""
        return Count(*(mine + its for mine, its in zip(self, other, strict=True)))

    @property
    def trained(self) -> float:
        """Parameters that are trained, each once."""
        return self.dense + self.expert

    @property
    def all(self) -> float:
        """All parameters, each once."""
        return self.trained + self.frozen

    def under(self, adapters: Adapters | None) -> Count:
        """Returns the same parameters, frozen if only ``adapters`` are trained."""
        return self if adapters is None else self._replace(dense=0.0, expert=0.0, frozen=self.all)


class Symbol(NamedTuple):
    """How one part of a layer is estimated.

    Args:
        name: what it is.
        work: its work.
        parameters: its parameters, none of them counted as quantized.
        activations: its activations, given the bytes of one number of a linear's input or of its output's gradient.
    """

    name: str
    work: Callable[[Build], PartWork]
    parameters: Callable[[Build], Count]
    activations: Callable[[Build, float], Layer]


def flops(linears: Sequence[LinearShape]) -> float:
    """FLOPs per token of ``linears``, forward."""
    return sum(linear.flops for linear in linears)


def weights(linears: Sequence[LinearShape]) -> float:
    """Number of weights of ``linears``."""
    return sum(linear.weights for linear in linears)


def between(build: Build) -> int:
    """Number of ranks over which the hidden states between linears are split."""
    return build.tensor if build.sequence_parallel else 1


def around(build: Build) -> float:
    """Bytes that F, and I, move for the norm before a part, and for the dropout and the sum after it."""
    return 11.0 * build.shape.hidden / between(build)


def mask_number(build: Build) -> float:
    """Bytes of one number of a dropout's mask."""
    return build.number if build.plain else 1.0


def hidden_mask(build: Build) -> float:
    """Bytes of one number of the mask of the dropout after a part or the embedding."""
    return mask_number(build) if build.shape.masks[1] else 0.0


def norm_input(build: Build, width: float) -> float:
    """Bytes that a norm of ``width`` keeps."""
    if build.plain and not build.two_norms:  # what it scales is kept for the gradient of the scale
        return (1 if build.adapters else 2) * SINGLE * width
    return build.residual * width


def norm_parameters(build: Build, width: int) -> float:
    """Parameters of a norm of ``width``."""
    return (2.0 if build.two_norms else 1.0) * width


def around_part(build: Build, normed: Kept) -> dict[str, Kept]:
    """Bytes of what is around each part: its norm, with the ``normed`` outputs, and the dropout after it."""
    hidden = build.shape.hidden / between(build)
    read = Kept(norm_input(build, hidden))
    inputs = {"inputs": read}
    if build.streams > 1:  # what the part gives is shared out over the streams, of which its input is a sum
        inputs = {"inputs": Kept(build.residual * hidden), "mhc": read.plus(Kept(streams(build)))}
    return {
        **inputs,
        "layernorm": normed,
        "masks": Kept(hidden_mask(build) * hidden),
    }


def streams(build: Build) -> float:
    """Bytes of all residual streams."""
    return build.streams * build.residual * build.shape.hidden / between(build)


def mixed(build: Build) -> tuple[float, float]:
    """Bytes that F, and I, move around a part for hyper-connections; none with one residual stream.

    F reads the streams for their maps, for the part's input and for their mix, and writes this and the input. I does so
    for both gradients, and adds three of the streams up.
    """
    if build.streams == 1:
        return 0.0, 0.0
    one = build.residual * build.shape.hidden / between(build)
    return (4 * build.streams + 2) * one, (9 * build.streams + 3) * one


def into_linear(build: Build, operand: float, copies: int = 1) -> Kept:
    """Bytes of the hidden states that a column parallel linear reads, in one copy or in several."""
    size = copies * operand * build.shape.hidden / between(build)
    return Kept(size, size)


def shared(build: Build, operand: float, *, kept: bool) -> float:
    """Bytes of one number that a linear reads, and that its producer keeps too if ``kept``."""
    if operand == build.number or (operand and build.quantized and build.quantized.keeps_originals):
        return build.number
    return operand + (build.number if kept else 0.0)


def for_rows(build: Build, operand: float, width: float) -> float:
    """Bytes from I to W of a row parallel linear: its input of ``width``, and its output's gradient.

    Tensor-parallel ranks that add to ``main_grad`` compute its product in I. Quantized gradients stay gathered.
    """
    if build.tensor > 1 and build.fused_gradients:
        return 0.0
    return operand * (width + build.shape.hidden / (between(build) if operand == build.number else 1))


def adapter(build: Build, linear: LinearShape) -> tuple[LinearShape, ...]:
    """Both products of the adapter of ``linear``; none without one. Each tensor-parallel rank has them whole."""
    if build.adapters is None or linear.name not in build.adapters.targets:
        return ()
    rank = build.adapters.rank
    return linear._replace(out=rank, name=""), linear._replace(inner=rank, name="")


def kept_for_adapters(build: Build, linears: Sequence[LinearShape]) -> Kept:
    """Bytes of the activations of the adapters of ``linears``, never quantized."""
    kept = Kept()
    for linear in linears:
        products, row = adapter(build, linear), build.number * linear.rows
        for product in products:
            kept = kept.plus(Kept(row * product.inner, row * (product.inner + product.out)))
        if products and linear.name == "linear_proj" and build.shape.fused:  # attention keeps its output anyway
            kept = kept.plus(Kept(-row * linear.inner))
    return kept
