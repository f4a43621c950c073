"""Layers that were measured on one GPU, without a pipeline, beside their estimates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.accuracy.models import flags
from megatron.schedules.estimate.activations import activations, whole
from megatron.schedules.estimate.build import LayerKind
from megatron.schedules.estimate.devices import DEVICES
from megatron.schedules.estimate.models import MODELS, Model, built
from megatron.schedules.estimate.roofline import Roofline
from megatron.schedules.estimate.symbols import typical_layers
from megatron.schedules.estimate.times import layer_times, loads, output_times

_FILE = Path(__file__).with_name("layers.json")


class TimedLayer(NamedTuple):
    """One decoder layer, or an output layer with its loss; each figure predicted and measured.

    Args:
        name: the model, and what of it.
        forward, whole: milliseconds of F, and of stock's whole backward.
        input_grad, weight_grad: milliseconds of I and W; None for an output layer, which is not split.
        kept: MiB that a microbatch keeps from F to I; None for an output layer.
        ratio: of I and W together to the whole backward, measured: the quartiles of pairs.
    """

    name: str
    forward: tuple[float, float]
    whole: tuple[float, float]
    input_grad: tuple[float, float] | None = None
    weight_grad: tuple[float, float] | None = None
    kept: tuple[float, float] | None = None
    ratio: tuple[float, float, float] | None = None


class HeldLayer(NamedTuple):
    """What a microbatch keeps of a layer with experts, in MiB, predicted and measured: from F to I and from I to W."""

    name: str
    after_forward: tuple[float, float]
    after_input_grad: tuple[float, float]


class MeasuredLayers(NamedTuple):
    """All measured layers.

    Args:
        where: the GPU and the software, in words.
        layers: dense ones.
        experts: layers with experts.
        kernels: milliseconds of the kernels of all linears of such a layer, in its whole backward and in I and W.
    """

    where: str
    layers: tuple[TimedLayer, ...]
    experts: tuple[HeldLayer, ...]
    kernels: tuple[float, float]


def measured_layers() -> MeasuredLayers:
    """Returns what ``layers.json`` has, with estimates."""
    found = json.loads(_FILE.read_text())
    kernels = found["experts"]["kernels"]
    of_linears = kernels["whole"], kernels["split"]
    return MeasuredLayers(found["measured_on"], tuple(_layers(found)), tuple(_experts(found["experts"])), of_linears)


def _layers(found: Any) -> Iterator[TimedLayer]:
    roofline = Roofline(DEVICES[found["device"]])
    for row in found["rows"]:
        model, output, count = MODELS[row["model"]], row["output"], row["layers"]
        build = built(model.trained(cross_entropy_loss_fusion=False, vocab_size=output["words"]))
        times = layer_times(build, roofline, build.tokens, LayerKind(typical_layers(build)[0]))
        forward, input_grad, weight_grad = (1e3 * each for each in times)
        kept = loads(build, roofline, build.tokens).layers[0].split.held
        yield TimedLayer(
            f"{row['model']}, a layer",
            (forward, row["forward"] / count),
            (input_grad + weight_grad, row["whole"] / count),
            (input_grad, row["input"] / count),
            (weight_grad, row["weight"] / count),
            (kept / 2**20, row["kept"] / count / 2**20),
            tuple(row["ratio"]),
        )
        forward, *backward = (1e3 * each for each in output_times(build, roofline, build.tokens))
        yield TimedLayer(
            f"{row['model']}, output layer of {output['words']:,} words",
            (forward, output["forward"]),
            (sum(backward), output["whole"]),
        )


def _experts(found: Any) -> Iterator[HeldLayer]:
    for row in found["rows"]:
        build = built(Model(row["model"], flags(row["model"])).of_length(found["tokens"]).args)
        held = whole(activations(build).layers[0])
        yield HeldLayer(
            row["model"],
            (build.tokens * held.forward / 2**20, row["after_forward"] / 2**20),
            (build.tokens * held.weights / 2**20, row["after_input_grad"] / 2**20),
        )
