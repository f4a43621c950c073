"""What the passes of the model on the command line cost, and what of that was assumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.schedules.estimate.megatron_flags import divisible
from megatron.schedules.estimate.model_build import as_built, with_model
from megatron.schedules.estimate.shape import Shape
from megatron.schedules.estimate.times import loads
from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.integration.flags.vocabulary import shares
from megatron.schedules.integration.layers.arithmetic import shape_of
from megatron.schedules.integration.layers.by_stage import (
    layers_by_stage,
    placed_by_hand,
    placed_by_planner,
    wrong_layers,
)
from megatron.schedules.measure.cost_profile import read_profile
from megatron.schedules.measure.profile_facts import Facts, Profile
from megatron.schedules.planner.layer_partition import as_layout
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.utils import parsing
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.printable import printable


def costs_of(args: Any, stages: int) -> Costs:
    """Costs for a pipeline of the model in ``args``: measured or given where a flag says so, else its own arithmetic.

    Args:
        args: Megatron's, validated or not.
        stages: of the plan, or, where that is searched for, at most.

    Raises:
        PlanError: naming the flag that is wrong.
    """
    shape, shared = shape_of(args), shares(args)
    if shared and (shape is None or not shape.vocabulary):
        raise PlanError(f"{FLAGS['shared_vocabulary']} needs the model's sizes, its vocabulary's too: give their flags")
    if shared and args.pipeline_schedule_stage_weights is not None:
        raise PlanError(f"{FLAGS['shared_vocabulary']} plans by the model: leave {FLAGS['stage_weights']} out")
    if shared and shape is not None:
        shape = replace(shape, vocabulary=divisible(shape.vocabulary, args))
    profile = _profile(args, shape)
    costs = _times(args, shape, profile)
    if shape is not None:
        build = as_built(args, shape)
        costs = with_model(costs, args, build, stages, shared=shared, placed=placed_by_planner(args), profile=profile)
    if placed_by_hand(args) and not wrong_layers(args, stages):
        costs = replace(costs, layers=layers_by_stage(args, stages))
    weights = parsing.numbers(FLAGS["stage_weights"], args.pipeline_schedule_stage_weights)
    return costs if weights is None else replace(costs, stage_weights=weights)


def assumed(args: Any, costs: Costs) -> str:
    """What a job says of the costs that it was planned for."""
    if args.pipeline_schedule_costs_file is not None:
        said = f"measured times ({printable(str(args.pipeline_schedule_costs_file))})"
    elif args.pipeline_schedule_costs is not None:
        said = f"F,I,W {args.pipeline_schedule_costs} as given"
    else:
        by = "by the model's arithmetic" if costs.model else "assumed"
        said = f"F,I,W {costs.forward:g},{costs.input_grad:.3g},{costs.weight_grad:.3g} {by}"
    if costs.stage_weights is not None:
        return f"{said}; stages' weights as given"
    if costs.model is None:
        return f"{said}; equal stages assumed"
    layers = costs.last_in_layers
    where = f"; layers {as_layout(costs.layers, args.mtp_num_layers or 0)}" if costs.layers else ""
    ahead = " with multi-token prediction" if args.mtp_num_layers else ""
    known = "" if layers > 0.01 else ", its vocabulary not being known"
    if costs.shared_vocabulary:
        known = f", and shared with the embedding by {args.pipeline_model_parallel_size} ranks"
    return f"{said}; the output layer{ahead} counted as {layers:.2g} decoder layers{known}{where}"


def _profile(args: Any, shape: Shape | None) -> Profile | None:
    """What was measured, where a flag names it."""
    file = args.pipeline_schedule_costs_file
    if file is None:
        return None
    if args.pipeline_schedule_costs is not None:
        raise PlanError(f"{FLAGS['costs']} and {FLAGS['costs_file']} both say how long passes take: give one")
    profile = read_profile(Path(file))
    if shape is not None and (fault := _fault(profile.facts, args, shape)):
        raise PlanError(f"{file} was measured for another model: {fault}; measure this one", "costs_file")
    return profile


def _times(args: Any, shape: Shape | None, profile: Profile | None) -> Costs:
    """Costs as measured, as given, or by arithmetic."""
    text = args.pipeline_schedule_costs
    if profile is not None:
        return profile.costs(args.pipeline_model_parallel_size)
    if text is not None or shape is None:
        return Costs.parse(text or "1,1,1,0")
    return Costs(*loads(as_built(args, shape)).ratio)


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
