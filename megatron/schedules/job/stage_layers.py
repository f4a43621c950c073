"""The number of decoder layers of each stage, by Megatron's flags."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate

from megatron.schedules.estimate.bounds import MOST_LAYERS
from megatron.schedules.estimate.layer_pattern import PIPE
from megatron.schedules.job.spec import StockLayers
from megatron.schedules.job.values import Layers
from megatron.schedules.planner.layer_partition import as_layout
from megatron.schedules.schedule.model_loads import even
from megatron.schedules.utils.errors import PlanError

# Repetitions in a layout: of a group such as (tt|)*3, and then of a single letter such as t*4.
_REPEATED = (re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)"))


def layers_by_stage(stock: StockLayers, stages: int, layers: Layers | None = None) -> tuple[int, ...]:
    """Returns the decoder layers of each of ``stages`` stages in model order; several chunks a rank are several stages.

    All stages have the same number, unless the flags change that: ``--account-for-embedding-in-pipeline-split`` makes
    the first stage one layer smaller, ``--account-for-loss-in-pipeline-split`` the last one;
    ``--decoder-first-pipeline-num-layers`` and ``--decoder-last-pipeline-num-layers`` give those of the first and last
    stage; ``--pipeline-model-parallel-layout`` gives every stage's, as does ``--hybrid-layer-pattern`` with ``|``.

    Args:
        stock: Megatron's flags.
        stages: of the pipeline.
        layers: the value of ``--pipeline-layers``, which overrides all of these.

    Raises:
        PlanError: the layers cannot be divided so; names what can.
    """
    if isinstance(layers, tuple):
        return _custom(stock, stages, layers)
    if stock.segmented:
        return _from_pattern(stock.pattern or "", stages)
    if stock.layout is not None:
        return _from_layout(stock, stock.layout, stages)
    if not stock.by_hand:
        return _equal(stock, stages)
    first, last = stock.first, stock.last
    if any(count is not None and count < 1 for count in (first, last)):
        raise PlanError(
            "needs at least one layer in --decoder-first-pipeline-num-layers and -last-; for a first or last stage "
            "without layers use --account-for-embedding-in-pipeline-split, --account-for-loss-in-pipeline-split or a "
            "layout"
        )
    between = stages - (first is not None) - (last is not None)
    usual, rest = divmod((stock.count or 0) - (first or 0) - (last or 0), max(between, 1))
    if rest or usual < 1 or between < 1:
        ends = (first or 0) + (last or 0)
        raise PlanError(
            f"has {stages} stages, {between} of them between the ends that --decoder-first-pipeline-num-layers and "
            f"-last- name: {_counted(stock)} must be {ends} + a multiple of {between}, not {stock.count}"
        )
    counts = [usual] * stages
    counts[0] = usual if first is None else first
    counts[-1] = usual if last is None else last
    return tuple(counts)


def written(stock: StockLayers, layers: Sequence[int]) -> str:
    """Returns the layers of each stage as Megatron's flags have them: as a layout, or as the pattern of a hybrid model.

    Args:
        stock: Megatron's flags.
        layers: number of layers of each stage, in model order.
    """
    if stock.pattern is None:
        return as_layout(tuple(layers), stock.ahead)
    return PIPE.join(letters_by_stage(stock.pattern, layers))


def letters_by_stage(pattern: str, layers: Sequence[int]) -> list[str]:
    """Returns the letters of each stage's layers in the ``pattern`` of a hybrid model, given their numbers."""
    letters = pattern.replace(PIPE, "")
    return [letters[end - count : end] for count, end in zip(layers, accumulate(layers), strict=True)]


def wrong_layers(stock: StockLayers, stages: int, layers: Layers | None = None) -> str:
    """Returns why the layers cannot be divided over so many stages; empty where they can."""
    try:
        layers_by_stage(stock, stages, layers)
    except PlanError as error:
        return str(error)
    return ""


def _custom(stock: StockLayers, stages: int, layers: tuple[int, ...]) -> tuple[int, ...]:
    said = f"--pipeline-layers {','.join(map(str, layers))}"
    if len(layers) != stages:
        raise PlanError(f"has {stages} stages and {said} has {len(layers)}: give a number for each, in model order")
    if sum(layers) != stock.count:
        raise PlanError(f"has {stock.count} layers ({_flag(stock)}) and {said} has {sum(layers)}: give as many")
    return layers


def _equal(stock: StockLayers, stages: int) -> tuple[int, ...]:
    first, last = stock.stand_in
    counted = (stock.count or 0) + first + last
    usual, rest = divmod(counted, stages)
    if rest or not usual:
        also = " and ".join(["the embedding"] * first + ["the output layer"] * last)
        fitting = sorted({stages * max(1, usual), stages * (usual + 1)})
        instead = " or ".join(str(count - first - last) for count in fitting)
        raise PlanError(
            f"has {stages} stages: {_counted(stock)}{f' with {also}' if also else ''} must be a multiple of {stages}; "
            f"use {instead}, not {stock.count}"
        )
    return even(stock.count or 0, stages, (first, last))


def _from_pattern(pattern: str, stages: int) -> tuple[int, ...]:
    segments = pattern.split(PIPE)
    if len(segments) != stages:
        raise PlanError(
            f"has {stages} stages and --hybrid-layer-pattern {pattern!r} has {len(segments)}: write {stages}, in model "
            "order, with | between them, or leave out every |, and all stages get equally many layers"
        )
    return tuple(map(len, segments))


def _flag(stock: StockLayers) -> str:
    """Returns the flag that says how many layers there are."""
    return "--num-layers" if stock.pattern is None else "--hybrid-layer-pattern"


def _counted(stock: StockLayers) -> str:
    return _flag(stock) if stock.pattern is None else f"the number of layers in {_flag(stock)}"


def _from_layout(stock: StockLayers, text: str, stages: int) -> tuple[int, ...]:
    written = layout_stages(text)
    if len(written) != stages:
        raise PlanError(
            f"has {stages} stages and --pipeline-model-parallel-layout {text!r} has {len(written)}: write {stages}, "
            "in model order, with | between them"
        )
    plain = "".join(written).replace("m", "")
    decoders = plain.count("t")
    if plain != f"E{'t' * decoders}L":
        raise PlanError(f"--pipeline-model-parallel-layout {text!r} must begin with E, end with L, and hold t between")
    if decoders != stock.count:
        raise PlanError(
            f"--pipeline-model-parallel-layout {text!r} holds {decoders} layers and --num-layers is {stock.count}"
        )
    if any("m" in stage for stage in written[:-1]):
        raise PlanError(
            "holds multi-token prediction layers in its last stage: write every m before the L of the layout"
        )
    return tuple(stage.count("t") for stage in written)


def layout_stages(text: str) -> list[str]:
    """Returns the letters of each stage in a value of ``--pipeline-model-parallel-layout``, as Megatron reads it.

    Raises:
        PlanError: it has other letters, or repeats one too often.
    """
    letters = text.replace(",", "")
    for repeated in _REPEATED:
        letters = repeated.sub(_written_out, letters)
    if not set(letters) <= set("ELtm|"):
        raise PlanError(
            f"cannot read --pipeline-model-parallel-layout {text!r}: it is made of E (embedding), t (layer), L (output "
            "layer) and | between stages, such as 'Et|tt|tt|tL'"
        )
    return letters.split("|")


def _written_out(repeated: re.Match[str]) -> str:
    """Returns a repetition written out, or where no model has so many layers, a letter that is refused."""
    count = int(repeated[2])
    return repeated[1] * count if count <= MOST_LAYERS else "?"
