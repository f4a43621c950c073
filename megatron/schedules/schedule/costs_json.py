"""Costs in JSON files: costs of every stage, and costs as the user gave them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeVar

from msgspec import UNSET, Meta, UnsetType, defstruct
from msgspec.structs import asdict

from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.kinds import SPLIT, Kind, Share
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.schedule.stage_costs import StageCosts
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.json_files import Count, Form, Index, Portion, check_length, read_latencies

_Value = TypeVar("_Value")


class _ByMember[Key: Enum, Value](Form, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Form with a field for each member of an enumeration, by name."""

    members: ClassVar[type[Enum]]

    @classmethod
    def of(cls, values: Mapping[Key, Value]) -> Self:
        """Returns the form of ``values``."""
        return cls(**{key.name: value for key, value in values.items()})

    def values(self) -> dict[Key, Value]:
        """Returns the values that are set."""
        values: dict[Any, Value] = {key: getattr(self, key.name) for key in self.members}
        return {key: value for key, value in values.items() if value is not UNSET}


def _form(name: str, doc: str, base: Any, members: type[Enum], always: Collection[Enum]) -> Any:
    """Makes the form ``name`` with a field for each of ``members``; those not in ``always`` are optional."""
    fields = [(key.name, _Value) if key in always else (key.name, _Value | UnsetType, UNSET) for key in members]
    namespace = {"members": members, "__doc__": doc, "__orig_bases__": (base,)}
    return defstruct(name, fields, bases=(_ByMember,), namespace=namespace, module=__name__)


if TYPE_CHECKING:

    class ByKind[Value](_ByMember[Kind, Value], frozen=True): ...

    class ByShare[Value](_ByMember[Share, Value], frozen=True): ...

else:
    _KINDS = "A value for each kind of pass that there is; F, I and W always are."
    ByKind = _form("ByKind", _KINDS, _ByMember[Kind, _Value], Kind, SPLIT)
    _SHARES = "A value for each part of a stage's activations."
    ByShare = _form("ByShare", _SHARES, _ByMember[Share, _Value], Share, Share)


Quantity = Annotated[float, Meta(ge=0)]
"""Time or size in costs."""


class MessagesForm[Value](Form, frozen=True, kw_only=True):
    """Time of the experts' messages in a pass on each stage, by kind; R only if there is any."""

    F: tuple[Value, ...]
    I: tuple[Value, ...]  # noqa: E741 - the field's letter for the input gradient
    R: tuple[Value, ...] | UnsetType = UNSET

    def values(self) -> dict[Kind, tuple[Value, ...]]:
        """Returns the times that there are."""
        times = {Kind.F: self.F, Kind.I: self.I, Kind.R: self.R}
        return {kind: by_stage for kind, by_stage in times.items() if by_stage is not UNSET}


class StageCostsForm[Value](Form, frozen=True, kw_only=True):
    """Costs of every stage. All times have the same unit. Sizes are in microbatches of a rank's activations.

    times: duration on each stage, by kind of pass. B is left out; it takes as long as I and W together, less splitting.
    activation: activation memory of one microbatch on each stage without recompute and offload.
    comm: P2P latency between two ranks; 0 within a rank.
    held: size of each part of a stage's activations, on each stage.
    standing: memory of each stage's parameters, which is always allocated; empty if it is not counted.
    one_way: whether a rank copies in one direction at a time.
    latencies: [from, to, time] for each pair of ranks whose latency differs from comm.
    messages: part of the times of F, I and R in which a rank waits for messages of its experts, unless weight gradients
        run meanwhile; missing without such messages.
    splitting: price of a split backward on each stage; missing without.
    """

    times: ByKind[tuple[Value, ...]]
    activation: tuple[Value, ...]
    comm: Value
    held: ByShare[tuple[Value, ...]]
    standing: tuple[Value, ...]
    one_way: bool
    latencies: tuple[tuple[Index, Index, Value], ...]
    messages: MessagesForm[Value] | UnsetType = UNSET
    splitting: tuple[Value, ...] | UnsetType = UNSET

    @staticmethod
    def of(costs: StageCosts) -> StageCostsForm[float]:
        """Returns the form of ``costs``."""
        return StageCostsForm(
            times=ByKind.of(costs.times),
            activation=costs.activation,
            comm=costs.comm,
            held=ByShare.of(costs.held),
            standing=costs.standing,
            one_way=costs.one_way,
            latencies=tuple((source, to, latency) for (source, to), latency in costs.latencies.items()),
            messages=MessagesForm(**{kind.name: by_stage for kind, by_stage in costs.messages.items()})
            if costs.has_messages
            else UNSET,
            splitting=costs.splitting or UNSET,
        )


def stage_costs(form: StageCostsForm[float], placement: Placement, at: str) -> StageCosts:
    """Returns the costs in ``form``; raises :class:`.PlanError` with the path of a field that does not fit."""
    times, held = form.times.values(), form.held.values()
    messages = {} if form.messages is UNSET else form.messages.values()
    lists = {
        **{f"times.{kind}": by_stage for kind, by_stage in times.items()},
        "activation": form.activation,
        **{f"held.{share.name}": by_stage for share, by_stage in held.items()},
        **({"standing": form.standing} if form.standing else {}),
        **{f"messages.{kind}": by_stage for kind, by_stage in messages.items()},
        **({} if form.splitting is UNSET else {"splitting": form.splitting}),
    }
    for name, by_stage in lists.items():
        check_length(by_stage, placement.stages, f"{at}.{name}", "stage")
    latencies = read_latencies(form.latencies, placement.ranks, f"{at}.latencies")
    for kind, by_stage in messages.items():
        if any(message > time for message, time in zip(by_stage, times.get(kind, by_stage), strict=True)):
            raise PlanError(f"{at}.messages.{kind} must not exceed the time of the pass that they are part of")
    return StageCosts(
        times,
        form.activation,
        form.comm,
        held,
        form.standing,
        form.one_way,
        latencies,
        messages=messages,
        splitting=() if form.splitting is UNSET else form.splitting,
    )


class GivenCostsForm(Form, frozen=True, kw_only=True):
    """Costs of half a rank's layers as the user gave them, for information. The costs of stages follow from them.

    forward, input_grad, weight_grad, comm: F, I, W and the P2P latency of --costs.
    weight_share: activations from I to W over those from F to I; default 1.
    recompute: part of the forward that every I recomputes; default 0.
    recomputed_layers: number of the first layers of each stage for which it does; missing for all.
    kept: part of the activations that F keeps under that recompute; default 1.
    layer_input: part of a layer's activations that is its input, which recompute passes keep; default 0.06.
    recompute_time: time of a recompute pass R relative to F; default 1.
    splitting: time by which I and W together exceed a whole backward; default 0.
    copy: time to copy the activations of half a rank's layers in one direction; missing if none was given.
    one_way: whether a rank copies in one direction at a time; default false.
    latencies: [from, to, time] for each pair of ranks whose latency differs from comm.
    messages: parts of forward and of input_grad in which a rank waits for messages of its experts; default 0.
    output_layer_in_layers: time of the output layer in average decoder layers; missing without a model.
    shared_vocabulary: whether all ranks share the output layer (vocabulary parallelism); missing without a model.
    """

    forward: Quantity
    input_grad: Quantity
    weight_grad: Quantity
    comm: Quantity
    weight_share: Quantity | UnsetType = UNSET
    recompute: Portion | UnsetType = UNSET
    recomputed_layers: Count | UnsetType = UNSET
    kept: Portion | UnsetType = UNSET
    layer_input: Portion | UnsetType = UNSET
    recompute_time: Quantity | UnsetType = UNSET
    splitting: Quantity | UnsetType = UNSET
    copy: Quantity | UnsetType = UNSET
    one_way: bool | UnsetType = UNSET
    latencies: tuple[tuple[Index, Index, Quantity], ...] | UnsetType = UNSET
    messages: tuple[Quantity, Quantity] | UnsetType = UNSET
    output_layer_in_layers: Quantity | UnsetType = UNSET
    shared_vocabulary: bool | UnsetType = UNSET

    @staticmethod
    def of(costs: Costs) -> GivenCostsForm:
        """Returns the form of ``costs``, without default values."""
        values, defaults = _given(costs), _given(Costs())
        always = ("forward", "input_grad", "weight_grad", "comm")
        given = {name: value for name, value in values.items() if name in always or value != defaults[name]}
        if not costs.model.divisible:
            given |= {
                "output_layer_in_layers": costs.last_in_layers,
                "shared_vocabulary": costs.model.shared_vocabulary,
            }
        return GivenCostsForm(**given)


def _given(costs: Costs) -> dict[str, Any]:
    """Fields of :class:`GivenCostsForm` that do not depend on the model."""
    others = {
        "comm": costs.link.latency,
        "latencies": costs.link.pairs,
        "recompute": costs.layers.stock_recompute,
        "copy": costs.copies.time,
        "one_way": costs.copies.one_way,
    }
    values = vars(costs.layers) | asdict(costs.in_shares) | others
    return {name: values[name] for name in GivenCostsForm.__struct_fields__ if name in values}
