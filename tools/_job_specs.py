"""Jobs for comparisons with stock Megatron: pass times on a GPU, levelled layers, and what a schedule loses."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Any

from megatron.schedules.estimate.device_costs import device_costs
from megatron.schedules.estimate.devices import Device
from megatron.schedules.estimate.roofline import Roofline
from megatron.schedules.estimate.times import ONES, PassTimes, loads
from megatron.schedules.job.spec import JobSpec
from megatron.schedules.job.values import ScheduleChoice
from megatron.schedules.planner.partition_plans import levelled
from megatron.schedules.planner.registry import placement
from megatron.schedules.planner.request import Request
from megatron.schedules.schedule.model_loads import Part
from megatron.schedules.schedule.placement import Placement, zigzag

OVERLAP, GRAPHS = "overlap_moe_expert_parallel_comm", "cuda_graph_impl"
"""Arguments of stock's own overlap of experts' messages, and of CUDA graphs."""

MOST_WITH_A_LARGER_BUBBLE = 0.01
"""Estimates are not so exact that more is gained where ranks are idle for longer than under stock's schedule."""

PARTS = frozenset(("attn", "moe_router"))
"""Parts of layers that recipes captured before they captured whole iterations."""


def timed(spec: JobSpec, device: Device, *, stock: bool = False, correction: PassTimes = ONES) -> JobSpec:
    """Returns ``spec`` with the device's times; for ``stock``, its own overlap hides experts' messages.

    Args:
        spec: the job.
        device: the GPU.
        stock: true for stock's schedule.
        correction: measured over modelled times of a layer's passes, see :func:`.roofline.corrections`.
    """
    if spec.trained is None:
        return spec
    hides = bool(spec.hides_messages)
    times = device_costs(
        spec.trained,
        Roofline(device, overlaps=stock and hides),
        spec.sizes.pipeline,
        gpus=spec.sizes.world,
        hides=hides and not stock,
        correction=correction,
    )
    return replace(spec, times=times, hides_messages=spec.hides_messages and not stock)


def without(spec: JobSpec, arguments: Container[str]) -> JobSpec:
    """Returns the job without ``arguments``."""
    given = frozenset(each for each in spec.stock.given if each not in arguments)
    hides, model = spec.hides_messages and OVERLAP not in arguments, spec.model
    if model is not None and GRAPHS in arguments:
        # Graphs of parts of layers take the place of one of a whole iteration.
        parts = PARTS if model.build.captured else None
        model = replace(model, build=replace(model.build, graphs=parts, captured=False))
    return replace(spec, stock=replace(spec.stock, given=given), hides_messages=hides, model=model)


def placement_of(choice: ScheduleChoice, ranks: int) -> Placement:
    """Returns the placement of a schedule; two chunks of each rank in a V where a search would choose it."""
    request = Request(choice.name, ranks, 1, chunks=choice.chunks or 2)
    return placement(request) or zigzag(ranks, request.chunks)


def placed(spec: JobSpec, choice: ScheduleChoice, **settings: Any) -> JobSpec:
    """Returns ``spec`` under a schedule, with the layers from which a search would start. Searches take minutes."""
    parts = None if spec.build is None else loads(spec.build) if spec.times is None else spec.times.model
    if parts is not None and spec.settings.vocabulary_parallel:
        parts = replace(parts, first=Part(), last=Part())
    layers = None if parts is None else levelled(parts, placement_of(choice, spec.sizes.pipeline))
    free = replace(spec, layers=replace(spec.layers, first=None, last=None, layout=None, stand_in=(False, False)))
    return under(free, choice, layers=layers, **settings)


def under(spec: JobSpec, choice: ScheduleChoice, **settings: Any) -> JobSpec:
    """Returns ``spec`` under a schedule with the layers that its flags set."""
    spec = spec.under(choice.name, **settings)
    return replace(spec, settings=replace(spec.settings, schedule=choice))


def stock_choice(chunks: int) -> ScheduleChoice:
    """Returns stock's schedule with so many chunks of a rank."""
    name = "1f1b" if chunks == 1 else "interleaved-1f1b"
    return ScheduleChoice(name, name) if chunks == 1 else ScheduleChoice(f"{name}:{chunks}", name, chunks)
