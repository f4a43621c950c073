"""Checks of a job's costs against its model, and a description of what a plan assumes."""

from __future__ import annotations

from typing import Any

from megatron.schedules.estimate.build import Shape
from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.job.spec import JobSpec
from megatron.schedules.measure.profile_facts import Facts
from megatron.schedules.planner.layer_partition import as_layout
from megatron.schedules.planner.request import Request
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.printable import printable


def check_costs(spec: JobSpec) -> None:
    """Checks that the model's sizes are known to the flags that need them, and that the cost file is of this model.

    Raises:
        PlanError: a flag is wrong; the error names it.
    """
    shape, settings, custom = spec.shape, spec.settings, spec.custom_costs
    saving, file = settings.saving, settings.costs and settings.costs.file
    if settings.vocabulary_parallel and (shape is None or not shape.vocabulary):
        raise PlanError(f"{FLAGS['shared_vocabulary']} needs the model's sizes, its vocabulary's too: give their flags")
    if spec.profile is not None and shape is not None and (fault := _fault(spec.profile.facts, spec, shape)):
        raise PlanError(f"{file} was measured for another model: {fault}; measure this one", "costs_file")
    if custom is not None and custom.of_memory and shape is not None:
        raise PlanError(
            f"$.{custom.of_memory[0]} in {file} is for megatron-schedules: in training the model's sizes say what is "
            "held; leave it out",
            "costs_file",
        )
    flag = FLAGS["recompute" if saving.recompute else "offload"]
    if saving.recompute and spec.recompute.granularity == "full":
        raise PlanError(
            f"{flag} does not go with --recompute-granularity full: both recompute whole layers; leave one of them out"
        )
    if (saving.recompute or saving.offload) and spec.model is None:
        raise PlanError(f"{flag} needs the model's sizes: give their flags")


def assumed(spec: JobSpec, request: Request) -> str:
    """Describes the costs used for planning a job."""
    choice, costs, placed = spec.settings.costs, request.costs, request.decisions.layers
    if choice is not None and choice.file is not None:
        said = f"{'costs' if spec.profile is None else 'measured times'} ({printable(choice.text)})"
    elif choice is not None:
        said = f"F,I,W {choice.text} as given"
    else:
        by = "by the model's arithmetic" if costs.model else "assumed"
        said = f"F,I,W {costs.forward:g},{costs.input_grad:.3g},{costs.weight_grad:.3g} {by}"
    if costs.model is None:
        return f"{said}; equal stages assumed"
    layers = costs.last_in_layers
    where = f"; layers {as_layout(placed, spec.layers.ahead)}" if placed else ""
    ahead = " with multi-token prediction" if spec.layers.ahead else ""
    known = "" if layers > 0.01 else ", its vocabulary not being known"
    if costs.shared_vocabulary:
        known = f", and shared with the embedding by {spec.sizes.pipeline} ranks"
    return f"{said}; the output layer{ahead} counted as {layers:.2g} decoder layers{known}{where}"


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
