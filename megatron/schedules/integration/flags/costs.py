"""What the passes of the model on the command line cost, and what of that was assumed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from megatron.schedules.estimate.megatron_flags import divisible
from megatron.schedules.estimate.model_build import as_built, with_model
from megatron.schedules.estimate.shape import Shape
from megatron.schedules.estimate.times import loads
from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.integration.layers.arithmetic import shape_of
from megatron.schedules.integration.layers.by_stage import layers_by_stage, placed_by_hand, wrong_layers
from megatron.schedules.job.settings import Settings
from megatron.schedules.measure.cost_profile import read_costs
from megatron.schedules.measure.custom_costs import CustomCosts
from megatron.schedules.measure.profile_facts import Facts, Profile
from megatron.schedules.planner.layer_partition import as_layout
from megatron.schedules.planner.request import Request
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.printable import printable


class _File(NamedTuple):
    """The cost file: measured, or written by hand; nothing of both where none is named."""

    profile: Profile | None = None
    custom: CustomCosts | None = None


def costs_of(args: Any, settings: Settings, stages: int) -> Costs:
    """Costs for a pipeline of the model in ``args``: measured or given where a flag says so, else its own arithmetic.

    Args:
        args: Megatron's, validated or not.
        settings: of the job.
        stages: of the plan, or, where that is searched for, at most.

    Raises:
        PlanError: naming the flag that is wrong.
    """
    shape, shared, layers = shape_of(args), settings.vocabulary_parallel, settings.layers
    if shared and (shape is None or not shape.vocabulary):
        raise PlanError(f"{FLAGS['shared_vocabulary']} needs the model's sizes, its vocabulary's too: give their flags")
    if shared and shape is not None:
        shape = replace(shape, vocabulary=divisible(shape.vocabulary, args))
    profile, custom = _read(args, settings, shape)
    costs = _times(args, settings, shape, profile, custom)
    if shape is not None:
        build, is_searched = as_built(args, shape), layers == "auto"
        costs = with_model(costs, args, build, stages, shared=shared, placed=is_searched, profile=profile)
    return costs if custom is None else custom.added_to(costs)


def layers_of(args: Any, settings: Settings, stages: int) -> tuple[int, ...] | None:
    """How many decoder layers each stage has where flags say it."""
    by_hand = placed_by_hand(args) or isinstance(settings.layers, tuple)
    known = by_hand and not wrong_layers(args, stages, settings.layers)
    return layers_by_stage(args, stages, settings.layers) if known else None


def assumed(args: Any, settings: Settings, request: Request) -> str:
    """What a job says of the costs that it was planned for."""
    choice, costs, placed = settings.costs, request.costs, request.decisions.layers
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
    where = f"; layers {as_layout(placed, args.mtp_num_layers or 0)}" if placed else ""
    ahead = " with multi-token prediction" if args.mtp_num_layers else ""
    known = "" if layers > 0.01 else ", its vocabulary not being known"
    if costs.shared_vocabulary:
        known = f", and shared with the embedding by {args.pipeline_model_parallel_size} ranks"
    return f"{said}; the output layer{ahead} counted as {layers:.2g} decoder layers{known}{where}"


def _read(args: Any, settings: Settings, shape: Shape | None) -> _File:
    """The cost file, where a flag names one."""
    file = None if settings.costs is None else settings.costs.file
    if file is None:
        return _File()
    found = read_costs(file)
    if not isinstance(found, CustomCosts):
        if shape is not None and (fault := _fault(found.facts, args, shape)):
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


def _times(
    args: Any, settings: Settings, shape: Shape | None, profile: Profile | None, custom: CustomCosts | None
) -> Costs:
    """Costs as measured, as given, or by arithmetic."""
    if profile is not None:
        return profile.costs(args.pipeline_model_parallel_size)
    given = custom.times if custom is not None else settings.costs.times if settings.costs is not None else None
    return given or (Costs() if shape is None else Costs(*loads(as_built(args, shape)).ratio))


def _fault(facts: Facts, args: Any, shape: Shape) -> str:
    """How the profile's model differs from that of the flags; empty where it does not."""
    pairs: dict[str, tuple[Any, Any]] = {
        "--num-layers": (facts.layers, shape.layers),
        "--hidden-size": (facts.hidden_size, shape.hidden),
        "--num-attention-heads": (facts.heads, shape.heads),
        "--seq-length": (facts.sequence_length, shape.sequence),
        "--micro-batch-size": (facts.micro_batch_size, args.micro_batch_size),
        "--tensor-model-parallel-size": (facts.tensor_parallel, args.tensor_model_parallel_size),
        "--context-parallel-size": (facts.context_parallel, args.context_parallel_size),
    }
    if facts.recompute is not None:
        pairs["--recompute-granularity"] = (facts.recompute, args.recompute_granularity)
    return ", ".join(f"{flag} {was}, not {now}" for flag, (was, now) in pairs.items() if was != now)
