"""The order in which the graphs of a rank's layers are captured, and replayed: that of its program.

Transformer Engine's ``make_graphed_callables`` takes the order as a list of numbers: ``+c`` is the forward of chunk c,
``-c`` its I, and ``-c - 0.5`` the W of the latest I of chunk c. So with a chunk for each layer no W could come after
the next I. Here each layer has a chunk for each captured microbatch, and any order of F, I and W can be written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor

from megatron.schedules.programs.program import Program
from megatron.schedules.schedule.graph_slots import WITH_GRAPHS
from megatron.schedules.schedule.kinds import Kind, Pass
from megatron.schedules.schedule.placement import Placement

MASK = "attention_mask"
# Inputs that are the same for every layer and microbatch.
_SAME = ("rotary_pos_emb",)


class Place(NamedTuple):
    """One layer for one microbatch; ``layer`` is its index among the graphed layers of the chunk."""

    chunk: int
    microbatch: int
    layer: int


class LayerPass(NamedTuple):
    """One pass over one graphed layer; ``kind`` is F, I, W, or B for an I that computes the weight gradients too."""

    kind: Kind
    place: Place


class GraphNumbers:
    """Numbers of graphed layers and microbatches, from 0, as Megatron stores their graphs.

    Args:
        layers: graphed layers of each chunk of the rank.
        microbatches: n.
    """

    def __init__(self, layers: Sequence[int], microbatches: int) -> None:
        self._layers, self._before = layers, [0, *accumulate(layers)]
        self._microbatches = microbatches

    def __call__(self, chunk: int, microbatch: int, layer: int) -> int:
        return self._before[chunk] * self._microbatches + microbatch * self._layers[chunk] + layer

    def __iter__(self) -> Iterator[Place]:
        """Yields all places in the order of the numbers."""
        for chunk, count in enumerate(self._layers):
            for microbatch in range(self._microbatches):
                yield from (Place(chunk, microbatch, layer) for layer in range(count))


def graphed_passes(program: Program) -> list[Pass]:
    """Returns the passes of ``program`` that run through layers, in order."""
    return [Pass(each.stage, Kind(each.op), each.microbatch) for each in program.actions if each.op in WITH_GRAPHS]


def layer_passes(row: Iterable[Pass], placement: Placement, layers: Sequence[int]) -> Iterator[LayerPass]:
    """Yields the passes of a rank layer by layer; ``layers`` are the graphed layers of each chunk."""
    for stage, kind, microbatch in row:
        chunk = placement.chunk_of(stage)
        numbers = range(layers[chunk])
        for layer in numbers if kind is Kind.F else reversed(numbers):
            yield LayerPass(kind, Place(chunk, microbatch, layer))


def engine_order(
    passes: Iterable[LayerPass], places: Sequence[Place], defers: Callable[[int, int], bool]
) -> list[int | float]:
    """Returns the order for Transformer Engine, in which place i of ``places`` is its chunk i + 1.

    Args:
        passes: passes over these places, in order.
        places: layers with the microbatches that are captured.
        defers: whether a layer, by chunk and index, leaves weight gradients to W.
    """
    numbers = {place: number for number, place in enumerate(places, 1)}
    order: list[int | float] = []
    for kind, place in passes:
        if kind is Kind.F:
            order.append(numbers[place])
        elif kind is not Kind.W:
            order.append(-numbers[place])
        elif defers(place.chunk, place.layer):
            order.append(-numbers[place] - 0.5)
    return order


def one_by_one(chunks: int, microbatches: int) -> list[int]:
    """An order that lets stock allocate the static inputs of one microbatch only."""
    return [sign * (chunk + 1) for chunk in range(chunks) for _ in range(microbatches) for sign in (1, -1)]


def share_masks(kwargs: MutableSequence[Any]) -> None:
    """Leaves one attention mask of each shape in ``kwargs``, the inputs by name, where no layer reads it."""
    masks: dict[Any, Tensor] = {}
    for index, named in enumerate(kwargs):
        if MASK in named:
            kwargs[index] = named | {MASK: masks.setdefault(named[MASK].shape, named[MASK])}


def set_static_inputs(
    order: Sequence[int | float], args: MutableSequence[Any], kwargs: MutableSequence[Any], *, shares_mask: bool = False
) -> None:
    """Replaces the static inputs of each number by as many sets as are in flight in ``order``.

    A set is in use from the F of a layer and microbatch to its I, and then free for any other of the same shapes.

    Args:
        order: see :func:`engine_order`.
        args: for each number the positional inputs.
        kwargs: for each number the inputs by name.
        shares_mask: whether masks stay as :func:`share_masks` leaves them.
    """
    free: dict[Any, list[Any]] = defaultdict(list)
    same = (*_SAME, MASK) if shares_mask else _SAME

    def own_named(tensors: Any) -> Any:
        return {name: tensor if name in same else _own(tensor) for name, tensor in tensors.items()}

    for number in order:
        index = abs(int(number)) - 1
        form = _form(args[index], kwargs[index])
        if number > 0:
            found = free[form].pop() if free[form] else (tuple(map(_own, args[index])), own_named(kwargs[index]))
            args[index], kwargs[index] = found
        elif number == int(number):
            free[form].append((args[index], kwargs[index]))


def _form(args: Any, kwargs: Any) -> Any:
    named = [(name, tensor.shape, tensor.dtype) for name, tensor in sorted(kwargs.items())]
    return tuple((tensor.shape, tensor.dtype) for tensor in args), tuple(named)


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
