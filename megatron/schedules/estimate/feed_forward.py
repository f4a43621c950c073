"""MLP (``-``) and experts (``E``): estimates of both."""

from __future__ import annotations

from megatron.schedules.estimate.build import Build
from megatron.schedules.estimate.parts import (
    Count,
    Kept,
    Layer,
    LinearShape,
    PartWork,
    Symbol,
    around,
    around_part,
    between,
    flops,
    for_rows,
    into_linear,
    norm_parameters,
    shared,
    weights,
)
from megatron.schedules.estimate.shape import Experts


def _linears(build: Build, inner: float, tensor: int) -> tuple[LinearShape, ...]:
    hidden, wide = build.shape.hidden, (2 if build.shape.gated else 1) * inner / tensor
    return LinearShape(hidden, wide, name="linear_fc1"), LinearShape(inner / tensor, hidden, name="linear_fc2")


def _inner(build: Build) -> float:
    return float(build.shape.inner or 4 * build.shape.hidden)


def _moved(build: Build, inner: float) -> tuple[float, float]:
    """Bytes that F and I move, with the activation function of ``inner`` width."""
    return around(build) + 4.0 * inner / build.tensor, around(build) + 6.0 * inner / build.tensor


def _work(build: Build) -> PartWork:
    linears = _linears(build, _inner(build), build.tensor)
    return PartWork(linears, moved=_moved(build, _inner(build)), modules={"mlp": (flops(linears), 0.0)})


def _parameters(build: Build) -> Count:
    return Count(norm_parameters(build, build.shape.hidden) + _counted(build, _work(build).linears))


def _counted(build: Build, linears: tuple[LinearShape, ...]) -> float:
    """Parameters of ``linears``."""
    return weights(linears) + (sum(linear.parts * linear.out for linear in linears) if build.biases else 0.0)


def _activations(build: Build, operand: float) -> Layer:
    inner = _inner(build) / build.tensor
    mlp = _inside(build, operand, inner, rows=1.0).plus(Kept(0.0, for_rows(build, operand, inner)))
    return {**around_part(build, into_linear(build, operand)), "mlp": mlp}


def _inside(build: Build, operand: float, inner: float, rows: float, scaled: bool = False) -> Kept:
    """Bytes of the activations between both linears of an MLP, and for W of the first.

    Args:
        operand: bytes of one number of a linear's input, or of its output's gradient.
        inner: width.
        rows: rows per token.
        scaled: true if rows are weighted after the activation function.
    """
    wide = (2 if build.shape.gated else 1) * inner
    apart = 0.0
    if not build.fused_activation:
        apart = (2 * inner if build.shape.gated else 0.0) + (inner if scaled else 0.0)
    return Kept(rows * (build.number * (wide + apart) + operand * inner), rows * operand * wide)


def _experts(build: Build) -> Experts:
    assert build.shape.experts is not None, "a layer has experts"
    return build.shape.experts


def _routed(build: Build) -> tuple[LinearShape, ...]:
    experts = _experts(build)
    rows, parts = experts.chosen * build.expert_tensor / build.tensor, max(1.0, experts.number)
    into, out = (each._replace(rows=rows, parts=parts) for each in _linears(build, experts.inner, build.expert_tensor))
    return into._replace(inner=_read_by(build)), out._replace(out=_read_by(build))


def _read_by(build: Build) -> float:
    """Width of what experts read and give."""
    return float(_experts(build).latent or build.shape.hidden)


def _projections(build: Build) -> tuple[LinearShape, ...]:
    """Linears around experts with a width of their own. Each tensor-parallel rank has both whole, for its tokens."""
    hidden, latent, rows = build.shape.hidden, _experts(build).latent, 1 / between(build)
    return (LinearShape(hidden, latent, rows), LinearShape(latent, hidden, rows)) if latent else ()


def _shared_by_all(build: Build) -> tuple[LinearShape, ...]:
    width = _experts(build).shared
    return _linears(build, width, build.tensor) if width else ()


def _experts_work(build: Build) -> PartWork:
    experts = _experts(build)
    routed = _routed(build)
    linears = (*routed, *_projections(build), *_shared_by_all(build))
    return PartWork(
        linears,
        joined=len(routed) if build.fused_experts else 0,
        moved=_moved(build, experts.inner * experts.chosen + experts.shared),
        routed=2.0 * _read_by(build) * experts.chosen / build.tensor,
        modules={"moe": (flops(linears), 0.0)},
    )


def _experts_parameters(build: Build) -> Count:
    hidden, for_all = build.shape.hidden, _shared_by_all(build)
    dense = norm_parameters(build, hidden) + float(hidden * build.experts)  # the router
    dense += _counted(build, _projections(build))
    if for_all:
        dense += _counted(build, for_all) + (hidden if build.shared_gate else 0.0)
    return Count(dense, _counted(build, _routed(build)))


def _experts_activations(build: Build, operand: float) -> Layer:
    experts = _experts(build)
    chosen, width = experts.chosen, build.shape.hidden / between(build)
    # Tokens are split over tensor-parallel ranks and gathered by those of an expert, evenly over experts.
    rows = chosen * build.expert_tensor / build.tensor
    outer = operand * rows * _read_by(build)
    routed = _inside(build, operand, experts.inner / build.expert_tensor, rows, scaled=True)
    # Scores of all experts; numbers, places and weights of the chosen ones.
    router = (8.0 * build.experts + 22.0 * chosen) / between(build)
    second = operand * rows * experts.inner / build.expert_tensor
    parts = {
        # A router keeps its input itself and computes its weight gradient in I.
        **around_part(build, Kept(build.number * width)),
        "router": Kept(router),
        "moe_act": Kept(second),
        "moe": routed.plus(Kept(outer - second, 2 * outer + second)),
    }
    if build.fused_experts:
        parts["moe"] = parts["moe"]._replace(weights=0.0)
    if experts.latent:
        latent = operand * experts.latent / between(build)
        read = 0.0 if experts.shared else operand * width  # shared experts keep it too
        parts["moe"] = parts["moe"].plus(Kept(latent, 2 * latent + operand * width + read))
    if experts.shared:
        inner = experts.shared / build.tensor
        copy = (shared(build, operand, kept=True) - build.number) * width  # of the router's input
        for_all = _inside(build, operand, inner, 1.0)
        parts["shared_experts"] = for_all.plus(Kept(copy, operand * width + for_rows(build, operand, inner)))
    return parts


MLP = Symbol("MLP", _work, _parameters, _activations)
EXPERTS = Symbol("experts", _experts_work, _experts_parameters, _experts_activations)
