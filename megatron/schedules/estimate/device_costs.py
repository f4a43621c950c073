"""Costs of a model's passes on a device, in seconds, and what an iteration takes besides its pipeline."""

from __future__ import annotations

from dataclasses import replace

from megatron.schedules.estimate.model_build import TrainedModel, with_messages
from megatron.schedules.estimate.parts import Count
from megatron.schedules.estimate.roofline import Roofline
from megatron.schedules.estimate.times import ONES, PassTimes, loads
from megatron.schedules.schedule.cost_parts import LayerTimes, Link
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.model_loads import Part


def device_costs(
    model: TrainedModel,
    roofline: Roofline,
    pipeline: int,
    *,
    gpus: int,
    hides: bool = False,
    correction: PassTimes = ONES,
) -> Costs:
    """Seconds of the passes, of each part of the model, and of messages between pipeline ranks.

    Args:
        model: the model as trained.
        roofline: prices of the device.
        pipeline: pipeline ranks.
        gpus: GPUs of the job. If they are of several domains, all messages are assumed to cross them.
        hides: true if weight gradients may run behind messages of experts.
        correction: measured over modelled times of a layer's passes, see :func:`.roofline.corrections`.
    """
    build = model.build
    of_parts = loads(build, roofline, build.tokens, correction)
    one = len(of_parts.layers) / (2 * pipeline)
    mean = of_parts.mean
    # What the roofline was held against are whole backwards.
    more, backward = one * (1 + roofline.splitting), one * (mean.input_grad + mean.weight_grad)
    layers = LayerTimes(
        one * mean.forward,
        more * mean.input_grad,
        more * mean.weight_grad,
        splitting=roofline.splitting * backward,
    )
    if hides:
        layers = with_messages(layers, build, roofline)
    # Embedding and output layer are never split.
    price = 1 + roofline.splitting
    of_parts = replace(of_parts, first=_unsplit(of_parts.first, price), last=_unsplit(of_parts.last, price))
    return Costs(layers, of_parts, Link(roofline.message(model.message_bytes, same_node=gpus <= roofline.domain)))


def _unsplit(part: Part, price: float) -> Part:
    """Returns the load of a part whose backward takes less than that of split layers by ``price``."""
    whole = part.whole
    return part._replace(
        whole=whole._replace(input_grad=whole.input_grad / price, weight_grad=whole.weight_grad / price)
    )


def optimizer_seconds(model: TrainedModel, roofline: Roofline, most: Count, data: int) -> float:
    """Seconds of the optimizer step: gradients and state are read, and state and weights written.

    Args:
        model: the model as trained.
        roofline: prices of the device.
        most: parameters of the pipeline rank with the most.
        data: ranks that share the optimizer's state.
    """
    numbers = model.numbers
    return roofline.stream(most.trained * (numbers.gradient + 2 * numbers.optimizer + numbers.weight) / data, 0)


def reduction_seconds(model: TrainedModel, roofline: Roofline, most: Count, *, same_node: bool) -> float:
    """Seconds of the gradients' reduce-scatter and the parameters' all-gather, without overlap.

    Args:
        model, roofline, most: as in :func:`optimizer_seconds`; the optimizer is distributed.
        same_node: true if links connect these ranks.
    """
    size = model.numbers.gradient + model.numbers.weight
    parts = zip((most.dense, most.expert), model.numbers.shared_by, strict=True)
    return sum(roofline.collective(size * count, ranks, same_node=same_node) for count, ranks in parts)
