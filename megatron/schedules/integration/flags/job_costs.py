"""Costs of the passes of a job's model, and a description of their assumptions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from megatron.schedules.estimate.build import Shape
from megatron.schedules.estimate.model_build import with_model
from megatron.schedules.estimate.times import loads
from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.integration.layers.by_stage import layers_by_stage, wrong_layers
from megatron.schedules.job.spec import JobSpec
from megatron.schedules.measure.cost_profile import CustomCosts, Profile, read_costs
from megatron.schedules.measure.profile_facts import Facts
from megatron.schedules.planner.layer_partition import as_layout
from megatron.schedules.planner.request import Request
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.printable import printable


class _File(NamedTuple):
    """Cost file, either measured or written by hand; both fields are None without a file."""

    profile: Profile | None = None
    custom: CustomCosts | None = None


def costs_of(spec: JobSpec, stages: int, *, reserves: bool = False) -> Costs:
    """Costs of a job's pipeline, from the flag or from the model's arithmetic.

    Args:
        spec: the job.
        stages: number of stages of the plan; the largest number if the planner searches it.
        reserves: true to reserve memory for parameters also if the planner does not partition the layers.

    Raises:
        PlanError: a flag is wrong; the error names it.
    """
    shape, model, settings = spec.shape, spec.trained, spec.settings
    if settings.vocabulary_parallel and (shape is None or not shape.vocabulary):
        raise PlanError(f"{FLAGS['shared_vocabulary']} needs the model's sizes, its vocabulary's too: give their flags")
    profile, custom = _read(spec)
    costs = _times(spec, profile, custom)
    if model is not None:
        shared, placed = settings.vocabulary_parallel, reserves or settings.layers == "auto"
        hides = settings.hides_messages
        costs = with_model(costs, model, stages, shared=shared, placed=placed, profile=profile, hides=hides)
    if not settings.hides_messages:
        costs = replace(costs, messages=(0.0, 0.0))
    return costs if custom is None else custom.added_to(costs)


def layers_of(spec: JobSpec, stages: int) -> tuple[int, ...] | None:
    """Decoder layers of each stage, if flags set them."""
    layers = spec.settings.layers
    by_hand = spec.layers.by_hand or isinstance(layers, tuple)
    known = by_hand and not wrong_layers(spec.layers, stages, layers)
    return layers_by_stage(spec.layers, stages, layers) if known else None


def assumed(spec: JobSpec, request: Request) -> str:
    """Describes the costs used for planning a job."""
    choice, costs, placed = spec.settings.costs, request.costs, request.decisions.layers
    if choice is not None and choice.file is not None:
        measured = not isinstance(read_costs(choice.file), CustomCosts)
        said = f"{'measured times' if measured else 'costs'} ({printable(choice.text)})"
    elif choice is not None:
        said = f"F,I,W {choice.text} as given"
    else:
        by = "by the model's arithmetic" if costs.model else "assumed"
        said = f"F,I,W {costs.forward:g},{costs.input_grad:.3g},{costs.weight_grad:.3g} {by}"
    if costs.stage_weights is not None:
        return f"{said}; stages' weights as given"
    if costs.model is None:
        return f"{said}; equal stages assumed"
    layers = costs.last_in_layers
    where = f"; layers {as_layout(placed, spec.layers.ahead)}" if placed else ""
    ahead = " with multi-token prediction" if spec.layers.ahead else ""
    known = "" if layers > 0.01 else ", its vocabulary not being known"
    if costs.shared_vocabulary:
        known = f", and shared with the embedding by {spec.sizes.pipeline} ranks"
    return f"{said}; the output layer{ahead} counted as {layers:.2g} decoder layers{known}{where}"


def _read(spec: JobSpec) -> _File:
    """Reads the cost file, if a flag names one."""
    settings, shape = spec.settings, spec.shape
    file = None if settings.costs is None else settings.costs.file
    if file is None:
        return _File()
    found = read_costs(file)
    if not isinstance(found, CustomCosts):
        if shape is not None and (fault := _fault(found.facts, spec, shape)):
            raise PlanError(f"{file} was measured for another model: {fault}; measure this one", "costs_file")
        return _File(profile=found)
    if found.stage_weights is not None and settings.vocabulary_parallel:
        raise PlanError(f"{FLAGS['shared_vocabulary']} plans by the model: leave $.stage_weights out of {file}")
    if found.of_memory and shape is not None:
        raise PlanError(
            f"$.{found.of_memory[0]} in {file} is for megatron-schedules: in training the model's sizes say what is "
            "held; leave it out",
            "costs_file",
        )
    return _File(custom=found)


def _times(spec: JobSpec, profile: Profile | None, custom: CustomCosts | None) -> Costs:
    """Returns costs as measured, from the flag, or from arithmetic."""
    if profile is not None:
        return profile.costs(spec.sizes.pipeline)
    choice = spec.settings.costs
    given = custom.times if custom is not None else None if choice is None else choice.times
    return given or (Costs() if spec.build is None else Costs(*loads(spec.build).ratio))


def _fault(facts: Facts, spec: JobSpec, shape: Shape) -> str:
    """Difference between the profile's model and the job's; empty without one."""
    pairs: dict[str, tuple[Any, Any]] = {
        "--num-layers": (facts.layers, shape.layers),
        "--hidden-size": (facts.hidden_size, shape.hidden),
        "--num-attention-heads": (facts.heads, shape.heads),
        "--seq-length": (facts.sequence_length, shape.sequence),
        "--micro-batch-size": (facts.micro_batch_size, spec.batch.micro),
        "--tensor-model-parallel-size": (facts.tensor_parallel, spec.sizes.tensor),
        "--context-parallel-size": (facts.context_parallel, spec.sizes.context),
    }
    if facts.recompute is not None:
        pairs["--recompute-granularity"] = (facts.recompute, spec.recompute.granularity)
    return ", ".join(f"{flag} {was}, not {now}" for flag, (was, now) in pairs.items() if was != now)
