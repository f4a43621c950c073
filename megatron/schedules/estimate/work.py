"""Arithmetic and moved bytes of a model's parts, for one token on one tensor-parallel rank."""

from __future__ import annotations

from typing import NamedTuple

from megatron.schedules.estimate.build import Build, Experts, Latent


class LinearShape(NamedTuple):
    """A linear.

    Args:
        inner, out: widths of its input and its output.
        rows: rows per token.
        parts: number of separate products that share the rows, such as experts.
    """

    inner: float
    out: float
    rows: float = 1.0
    parts: float = 1.0

    @property
    def flops(self) -> float:
        """FLOPs per token, forward."""
        return 2.0 * self.rows * self.inner * self.out


class LayerWork(NamedTuple):
    """Work of a decoder layer, as in arXiv 2205.05198, appendix A.

    Args:
        attention, mlp: linears of attention and of the MLP.
        scores: FLOPs of attention itself, forward.
        moved: bytes that F and I move outside products: norms, dropouts, sums, activation functions.
        routed: bytes sent to all chosen experts, one way, those of the same rank included.
        projected_up: FLOPs of latent attention's up-projections.
        experts: true if ``mlp`` are experts.
    """

    attention: tuple[LinearShape, ...]
    mlp: tuple[LinearShape, ...]
    scores: float
    moved: tuple[float, float]
    routed: float = 0.0
    projected_up: float = 0.0
    experts: bool = False

    @property
    def flops(self) -> float:
        """FLOPs per token, forward."""
        return self.scores + sum(linear.flops for linear in (*self.attention, *self.mlp))

    def share(self, module: str, speed: float = 1.0) -> float:
        """Share of the forward's time that ``module``, by Megatron's name, needs; 0 for small modules.

        Args:
            module: the module.
            speed: speed of linears relative to attention's, in FLOPs.
        """
        attention, mlp = (sum(linear.flops for linear in linears) / speed for linears in (self.attention, self.mlp))
        up = self.projected_up / speed
        modules = {"core_attn": self.scores, "mla_up_proj": up, "moe" if self.experts else "mlp": mlp}
        return modules.get(module, 0.0) / (self.scores + attention + mlp)


def layer_work(build: Build, *, experts: bool = False) -> LayerWork:
    """Work of one decoder layer, dense or with experts."""
    shape, tensor = build.shape, build.tensor
    linears, scored = _attention(build) if shape.latent is None else _latent(build, shape.latent)
    inner = float(shape.inner or 4 * shape.hidden)
    mlp = _linears(build, inner, tensor)
    if experts and shape.experts is not None:
        mlp, inner = _experts(build, shape.experts)
    compressed = () if shape.latent is None else (shape.latent.query, shape.latent.key_value)
    around = 22.0 * shape.hidden / (tensor if build.sequence_parallel else 1)
    return LayerWork(
        attention=linears,
        mlp=mlp,
        # Causal: each token attends to half of the sequence on average, with two products.
        scores=shape.sequence * scored,
        moved=(around + 4.0 * inner / tensor, around + 6.0 * inner / tensor),
        routed=2.0 * shape.hidden * shape.experts.chosen / tensor if experts and shape.experts is not None else 0.0,
        projected_up=sum(linear.flops for linear in linears if linear.inner in compressed),
        experts=experts and shape.experts is not None,
    )


def output_layer(build: Build) -> LinearShape:
    """The output layer."""
    return LinearShape(build.shape.hidden, build.shape.vocabulary / build.tensor)


def _attention(build: Build) -> tuple[tuple[LinearShape, ...], float]:
    hidden, queries = build.shape.hidden, build.queries / build.tensor
    keys = float(build.groups * build.head)
    return (LinearShape(hidden, queries + 2 * keys), LinearShape(queries, hidden)), 2 * queries


def _latent(build: Build, latent: Latent) -> tuple[tuple[LinearShape, ...], float]:
    """Linears of latent attention. Each tensor-parallel rank has the whole down-projections."""
    hidden, heads = build.shape.hidden, build.shape.heads / build.tensor
    queries, values = heads * (latent.head + latent.position), heads * latent.value
    if latent.query is None:
        into: tuple[LinearShape, ...] = (LinearShape(hidden, queries),)
    else:
        into = LinearShape(hidden, latent.query), LinearShape(latent.query, queries)
    return (
        *into,
        LinearShape(hidden, latent.key_value + latent.position),
        LinearShape(latent.key_value, heads * latent.head + values),
        LinearShape(values, hidden),
    ), queries + values


def _linears(build: Build, inner: float, tensor: int, rows: float = 1.0, parts: float = 1.0) -> tuple[LinearShape, ...]:
    hidden, wide = build.shape.hidden, (2 if build.shape.gated else 1) * inner / tensor
    return LinearShape(hidden, wide, rows, parts), LinearShape(inner / tensor, hidden, rows, parts)


def _experts(build: Build, experts: Experts) -> tuple[tuple[LinearShape, ...], float]:
    """Linears of the experts, and their inner width for one token."""
    rows = experts.chosen * build.expert_tensor / build.tensor
    linears = _linears(build, experts.inner, build.expert_tensor, rows, max(1.0, experts.number))
    if experts.shared:
        linears += _linears(build, experts.shared, build.tensor)
    return linears, experts.inner * experts.chosen + experts.shared
