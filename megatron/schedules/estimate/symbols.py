"""The parts that layers are made of, by the symbol that ``--hybrid-layer-pattern`` has for them.

Everything that is estimated of a layer is the sum over its parts: a block of a GPT is ``*-``, ``*E``, ``+-`` or ``+E``,
and a hybrid model has one part a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron.schedules.estimate.attention import ATTENTION, LATENT
from megatron.schedules.estimate.build import Adapters, Build, LayerKind
from megatron.schedules.estimate.feed_forward import EXPERTS, MLP
from megatron.schedules.estimate.parts import (
    Count,
    Kept,
    Layer,
    LinearShape,
    PartWork,
    Symbol,
    adapter,
    between,
    flops,
    kept_for_adapters,
    weights,
)
from megatron.schedules.estimate.sparse_attention import SPARSE
from megatron.schedules.estimate.state_space import DELTA_NET, MAMBA

SYMBOLS: Mapping[str, Symbol] = {
    "*": ATTENTION,
    "+": LATENT,
    "-": MLP,
    "E": EXPERTS,
    "M": MAMBA,
    "G": DELTA_NET,
    "D": SPARSE,
}


def works(build: Build, symbols: str) -> tuple[PartWork, ...]:
    """Work of each part of a layer."""
    return tuple(SYMBOLS[symbol].work(build) for symbol in symbols)


def typical_layers(build: Build) -> tuple[str, ...]:
    """Returns the layers that stand for all where one number is for all: blocks with experts if any, else all."""
    layers = build.shape.layers
    return tuple(symbols for symbols in layers if len(symbols) > 1 and "E" in symbols) or layers


def layer_flops(build: Build, symbols: str) -> float:
    """FLOPs per token of a layer, forward."""
    return sum(work.flops for work in works(build, symbols))


def share(parts: tuple[PartWork, ...], module: str, speed: float = 1.0) -> float:
    """Share of the forward's time of ``parts`` that ``module``, by Megatron's name, needs; 0 for small modules.

    Args:
        parts: work of the parts of one layer or several.
        module: the module.
        speed: speed of linears relative to attention's, in FLOPs.
    """
    whole = sum(work.mixing[0] for work in parts)
    whole += sum(flops(work.linears) / speed for work in parts)
    in_module = [work.modules.get(module, (0.0, 0.0)) for work in parts]
    return sum(linears / speed + own for linears, own in in_module) / whole


def with_adapters(build: Build, adapters: Adapters | None) -> Build:
    """Returns ``build`` with ``adapters`` as all that is trained, unless none of its linears has one."""
    if adapters is None:
        return build
    names = {linear.name for kind in {*build.kinds} for linear in _linears(build, kind)}
    return build if names.isdisjoint(adapters.targets) else replace(build, adapters=adapters)


def layer_parameters(build: Build, kind: LayerKind) -> Count:
    """Parameters of a layer."""
    count = Count()
    for symbol in kind.symbols:
        count = count.plus(SYMBOLS[symbol].parameters(build))
    linears = _linears(build, kind)
    products = [product for linear in linears for product in adapter(build, linear)]
    return stored(build, kind, count, weights(linears)).under(build.adapters).plus(Count(weights(products)))


def _linears(build: Build, kind: LayerKind) -> list[LinearShape]:
    return [linear for work in works(build, kind.symbols) for linear in work.linears]


def stored(build: Build, kind: LayerKind, count: Count, linears: float) -> Count:
    """Adds to ``count`` how so many weights of ``linears`` in it are stored."""
    if not kind.quantized or build.quantized is None:
        return count
    return count._replace(quantized=linears, primary=linears if build.quantized.primary else 0.0)


def layer_activations(build: Build, kind: LayerKind) -> Layer:
    """Activations of a layer, by pieces."""
    pieces: dict[str, Kept] = {}
    for symbol in kind.symbols:
        for name, kept in SYMBOLS[symbol].activations(build, build.operand(quantized=kind.quantized)).items():
            pieces[name] = pieces.get(name, Kept()).plus(kept)
    if build.adapters is not None:
        pieces["adapters"] = kept_for_adapters(build, _linears(build, kind))
    states = _static_states(build, "E" in kind.symbols)
    return pieces | {"graphs": Kept(states * build.number * build.shape.hidden / between(build))}


def _static_states(build: Build, has_experts: bool) -> float:
    """Hidden states per token that graphs of a layer keep beside its activations, from F to I.

    The input of a whole layer is a copy of the output below, which stays too. Where tokens are permuted in a graph for
    experts on other ranks, they stay after they are sent.
    """
    if build.graphs is None or build.shape.experts is None or not has_experts:
        return float(build.graphs == frozenset())
    return float(build.shape.experts.chosen if "moe_preprocess" in build.graphs else not build.graphs)


def output_layer(build: Build) -> LinearShape:
    """The output layer."""
    return LinearShape(build.shape.hidden, build.shape.vocabulary / build.tensor)
