"""Costs in JSON files: those of every stage, from which times and memory follow, and those that were given."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.kind_forms import ByKind, ByShare
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.schedule.stage_costs import StageCosts
from megatron.schedules.utils.json_files import Form, Index, Portion, check_length, read_latencies

Quantity = Annotated[float, Meta(ge=0)]
"""A time or a size as costs have it: any that a plan may be made for."""


class StageCostsForm[Value](Form, frozen=True, kw_only=True):
    """Costs of every stage. Times are in any one unit, sizes in microbatches' worth of a rank's activations.

    times: by kind of pass, the duration on each stage. B, which is not there, takes as long as I and W.
    activation: what one microbatch holds on each stage where nothing is recomputed or offloaded.
    comm: P2P latency between two ranks; within a rank it is 0.
    held: by part of a stage's activations, its size on each stage.
    standing: what each stage's parameters hold all the time; empty where that is not counted.
    one_way: whether a rank copies in one direction at a time.
    latencies: the latency of single pairs of ranks that differs from comm: from, to, time.
    """

    times: ByKind[tuple[Value, ...]]
    activation: tuple[Value, ...]
    comm: Value
    held: ByShare[tuple[Value, ...]]
    standing: tuple[Value, ...]
    one_way: bool
    latencies: tuple[tuple[Index, Index, Value], ...]

    @staticmethod
    def of(costs: StageCosts) -> StageCostsForm[float]:
        """``costs`` as they are written."""
        return StageCostsForm(
            times=ByKind.of(costs.times),
            activation=costs.activation,
            comm=costs.comm,
            held=ByShare.of(costs.held),
            standing=costs.standing,
            one_way=costs.one_way,
            latencies=tuple((source, to, latency) for (source, to), latency in costs.latencies.items()),
        )


def stage_costs(form: StageCostsForm[float], placement: Placement, at: str) -> StageCosts:
    """``form`` as planning has it; raises :class:`.PlanError` with its path where it is not for ``placement``."""
    times, held = form.times.values(), form.held.values()
    lists = {
        **{f"times.{kind}": each for kind, each in times.items()},
        "activation": form.activation,
        **{f"held.{share.name}": each for share, each in held.items()},
        **({"standing": form.standing} if form.standing else {}),
    }
    for name, each in lists.items():
        check_length(each, placement.stages, f"{at}.{name}", "stage")
    latencies = read_latencies(form.latencies, placement.ranks, f"{at}.latencies")
    return StageCosts(times, form.activation, form.comm, held, form.standing, form.one_way, latencies)


class GivenCostsForm(Form, frozen=True, kw_only=True):
    """Costs as they were given, for half a rank's layers; those of stages follow from them. For people.

    forward, input_grad, weight_grad, comm: F, I, W and the P2P latency of --costs.
    stage_weights, stage_activations: as given by the flags of these names.
    weight_share: what I leaves to W, as a part of the activations; 1 where it is missing.
    recompute: the part of the forward that every I recomputes; 0 where it is missing.
    kept: the part of the activations that F keeps under that recompute; 1 where it is missing.
    layer_input: the part of a layer's activations that is its input, which recompute passes keep; 0.06 where missing.
    recompute_time: the time of a recompute pass R over that of F; 1 where it is missing.
    copy: the time to copy the activations of half a rank's layers, one way; missing where nothing was said of copies.
    one_way: whether a rank copies in one direction at a time; false where it is missing.
    latencies: the latency of single pairs of ranks that differs from comm: from, to, time.
    output_layer_in_layers: how many decoder layers take as long as the output layer; missing without a model.
    shared_vocabulary: whether all ranks share the output layer (vocabulary parallelism); missing without a model.
    """

    forward: Quantity
    input_grad: Quantity
    weight_grad: Quantity
    comm: Quantity
    stage_weights: tuple[Quantity, ...] | UnsetType = UNSET
    stage_activations: tuple[Quantity, ...] | UnsetType = UNSET
    weight_share: Quantity | UnsetType = UNSET
    recompute: Portion | UnsetType = UNSET
    kept: Portion | UnsetType = UNSET
    layer_input: Portion | UnsetType = UNSET
    recompute_time: Quantity | UnsetType = UNSET
    copy: Quantity | UnsetType = UNSET
    one_way: bool | UnsetType = UNSET
    latencies: tuple[tuple[Index, Index, Quantity], ...] | UnsetType = UNSET
    output_layer_in_layers: Quantity | UnsetType = UNSET
    shared_vocabulary: bool | UnsetType = UNSET

    @staticmethod
    def of(costs: Costs) -> GivenCostsForm:
        """``costs`` as they are written; what was not given is left out."""
        always = ("forward", "input_grad", "weight_grad", "comm")
        given = {
            field.name: getattr(costs, field.name)
            for field in dataclasses.fields(costs)
            if field.name in GivenCostsForm.__struct_fields__
            and (field.name in always or getattr(costs, field.name) != field.default)
        }
        if costs.stock_recompute:
            given["recompute"] = costs.stock_recompute
        if costs.model is not None:
            given |= {"output_layer_in_layers": costs.last_in_layers, "shared_vocabulary": costs.shared_vocabulary}
        return GivenCostsForm(**given)
