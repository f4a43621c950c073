"""Checks of a job's flags that need no plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.schedules.estimate.build_flags import GRAPHS, WHOLE
from megatron.schedules.estimate.shape import Shape
from megatron.schedules.job.job_costs import attention_of
from megatron.schedules.job.measuring import measured_iterations
from megatron.schedules.job.spec import JobSpec, Settings
from megatron.schedules.job.values import MemorySaving
from megatron.schedules.measure.profile_facts import Facts
from megatron.schedules.planner.registry import check_parts, follows_costs, names_following_costs
from megatron.schedules.utils.errors import PlanError

# Stock's flags that cannot be combined with plans for lengths, and why.
_NOT_WITH_LENGTHS = {
    "iterations_to_skip": "samples are read an iteration ahead; leave one of the two out",
    "hybrid_context_parallel": "it deals sequences out itself; leave one of the two out",
    "phase_transition_iterations": "samples of the next phase cannot be read ahead; leave one of the two out",
}

_ONE_PLAN = "graphs are captured once, in the order of one plan for one number of microbatches"
_SHAPE = "a graph is for microbatches of one shape"
_HOST_READS = "the host reads their lengths, and in a graph no host reads"
_NO_CLOCK = "a graph of a whole iteration has no clocks"
_ROUNDED = "Megatron makes the inputs of graphs in bf16, and other numbers would be rounded"
_NOT_WITH_GRAPHS = {
    "rampup_batch_size": _ONE_PLAN,
    "step_batch_size_schedule": _ONE_PLAN,
    "variable_seq_lengths": _SHAPE,
    "sft": _SHAPE,
    "dataloader_inter_document_masking": _SHAPE,
    "fp32_residual_connection": _ROUNDED,
}
_NOT_CAPTURED = {
    "rampup_batch_size": _ONE_PLAN,
    "step_batch_size_schedule": _ONE_PLAN,
    "variable_seq_lengths": _SHAPE,
    "sft": _HOST_READS,
    "dataloader_inter_document_masking": _HOST_READS,
    "timing_log_level": _NO_CLOCK,
    "fp16": "a graph repeats the loss scale that it was captured with; use bf16",
}
RUN_AGAIN = "moe_expert_rank_capacity_factor"
"""Argument of stock's with which an iteration may be run again."""

_TWICE = "an iteration with too many tokens for an expert is run again"
# With these, no host reads how many tokens experts get.
_FIXED_TOKENS = {"moe_pad_expert_input_to_capacity", RUN_AGAIN}


def validate(spec: JobSpec) -> None:
    """Runs the checks that need neither the model nor a plan.

    Raises:
        PlanError: a flag is wrong; the error names it.
    """
    settings, size, flags = spec.settings, spec.sizes.pipeline, spec.flags
    if "yaml_cfg" in spec.stock.given:
        raise PlanError(f"{flags['schedule']} does not work with --yaml-cfg: Megatron drops every other flag then")
    check_parts(settings.parts, [settings.schedule.name], flags)
    if size < 2:
        raise PlanError(
            f"{flags['schedule']} {settings.schedule.name} needs {flags['ranks']} 2 or more, not {size}; "
            "leave the flag out to run without a pipeline"
        )
    if settings.plan_lengths:
        _check_plan_lengths(spec)
    if spec.stock.cuda_graphs == GRAPHS:
        _check_graphs(spec)
    if spec.stock.cuda_graphs == WHOLE:
        _check_capture(spec)
    if RUN_AGAIN in spec.stock.given:
        _check_rerun(spec)
    measured_iterations(settings.measuring, spec.iterations)
    check_replan(settings, flags)
    if settings.places_layers and (spec.layers.by_hand or any(spec.layers.stand_in)):
        given = ",".join(map(str, settings.layers)) if isinstance(settings.layers, tuple) else settings.layers
        raise PlanError(
            f"{flags['layers']} {given} places the layers itself: leave out --pipeline-model-parallel-layout, "
            "--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers and --account-for-...-split, and "
            "every | in --hybrid-layer-pattern"
        )


def check_replan(settings: Settings, flags: Mapping[str, str]) -> None:
    """Refuses replanning if no measurement can change the order.

    Raises:
        PlanError: the error names the flag.
    """
    name = settings.schedule.name
    if settings.replans and not follows_costs(name, shared_vocabulary=settings.vocabulary_parallel):
        raise PlanError(
            f"{flags['replan']} with {flags['schedule']} {name} would change nothing: its order does not "
            f"depend on costs; leave the flag out, or use one of {', '.join(names_following_costs())}"
        )


def check_model(spec: JobSpec) -> None:
    """Checks that the model's sizes are known to the flags that need them, and that the cost file is of this model.

    Args:
        spec: a job in training, with its model and its cost file.

    Raises:
        PlanError: a flag is wrong; the error names it.
    """
    shape, settings, custom, flags = spec.shape, spec.settings, spec.custom_costs, spec.flags
    saving, file = settings.saving, settings.costs and settings.costs.file
    if settings.plan_lengths:
        attention_of(spec)
    if settings.vocabulary_parallel and (shape is None or not shape.vocabulary):
        raise PlanError(f"{flags['shared_vocabulary']} needs the model's sizes, its vocabulary's too: give their flags")
    if spec.profile is not None and shape is not None and (fault := _fault(spec.profile.facts, spec, shape)):
        raise PlanError(f"{file} was measured for another model: {fault}; measure this one", "costs_file")
    if custom is not None and custom.of_memory and shape is not None:
        raise PlanError(
            f"$.{custom.of_memory[0]} in {file} is for megatron-schedules: in training the model's sizes say what is "
            "held; leave it out",
            "costs_file",
        )
    flag = flags["recompute" if saving.recompute else "offload"]
    if saving.recompute and spec.recompute.granularity == "full":
        raise PlanError(
            f"{flag} does not go with --recompute-granularity full: both recompute whole layers; leave one of them out"
        )
    if (saving.recompute or saving.offload) and spec.model is None:
        raise PlanError(f"{flag} needs the model's sizes: give their flags")


def _check_graphs(spec: JobSpec) -> None:
    """Refuses what changes what CUDA graphs of layers have captured."""
    _refuse_with_one_plan(spec, f"--cuda-graph-impl {GRAPHS}", _NOT_WITH_GRAPHS)
    if "bf16" not in spec.stock.given:
        raise PlanError(f"--cuda-graph-impl {GRAPHS} needs --bf16: {_ROUNDED}")


def _check_capture(spec: JobSpec) -> None:
    """Refuses what changes what a CUDA graph of a whole iteration has captured, or lets a host wait in it."""
    given, impl = spec.stock.given, f"--cuda-graph-impl {WHOLE}"
    _refuse_with_one_plan(spec, impl, _NOT_CAPTURED, measured=_NO_CLOCK)
    if "cuda_graph_warmup_steps" not in given:
        raise PlanError(f"{impl} needs --cuda-graph-warmup-steps 1 or more: ranks tell each other about the first call")
    if "num_experts" in given and given.isdisjoint(_FIXED_TOKENS):
        raise PlanError(
            f"{impl} does not go with experts whose number of tokens the host reads: give --moe-expert-capacity-factor "
            "with --moe-pad-expert-input-to-capacity, or leave the flag out"
        )


def _check_rerun(spec: JobSpec) -> None:
    """Refuses what changes the order of passes that a paged stash has noted, or cannot run an iteration again."""
    plan = "it notes the order of one plan for one number of microbatches"
    more = {
        "rampup_batch_size": plan,
        "step_batch_size_schedule": plan,
        "overlap_dispatch_backward_with_experts_wgrad": "the schedule places weight gradients itself",
    }
    flag = f"--{RUN_AGAIN.replace('_', '-')}"
    _refuse_with_one_plan(
        spec,
        flag,
        more,
        one_plan=plan,
        verified="it would note two orders",
        saved="not tried so far",
        measured=_TWICE,
    )


def _refuse_with_one_plan(
    spec: JobSpec,
    what: str,
    more: Mapping[str, str],
    *,
    one_plan: str = _ONE_PLAN,
    verified: str = "the iteration that it verifies comes before the graphs",
    saved: str = "a graph neither recomputes nor offloads",
    measured: str = "",
) -> None:
    """Refuses settings that do not go with the flag ``what``, which needs one plan.

    Args:
        spec: the job.
        what: the flag.
        more: names of stock's arguments that do not go with it, and why.
        one_plan, verified, saved, measured: why several plans, a verification, recompute and offload passes, and a
            measurement do not go with it; empty if they do.
    """
    settings, given, flags = spec.settings, spec.stock.given, spec.flags
    changing = {
        flags["replan"]: (settings.replan, one_plan),
        f"{flags['memory_limit']} auto": (settings.measures_limit, one_plan),
        flags["plan_lengths"]: (settings.plan_lengths, one_plan),
        flags["verify"]: (settings.verify, verified),
        flags["save_memory"]: (settings.saving != MemorySaving(), saved),
        flags["measure"]: (settings.measuring is not None, measured),
        **{f"--{name.replace('_', '-')}": (name in given, why) for name, why in more.items()},
    }
    for flag, (is_given, why) in changing.items():
        if is_given and why:
            raise PlanError(f"{what} does not go with {flag}: {why}; leave one of the two out")


def _check_plan_lengths(spec: JobSpec) -> None:
    """Refuses plans for lengths where they cannot work."""
    settings, stock, flags = spec.settings, spec.stock, spec.flags
    flag = flags["plan_lengths"]
    for name, why in _NOT_WITH_LENGTHS.items():
        if name in stock.given:
            raise PlanError(f"{flag} does not go with --{name.replace('_', '-')}: {why}")
    if stock.dataloader_type == "external":
        raise PlanError(f"{flag} does not go with --dataloader-type external: its state would be an iteration ahead")
    if spec.sizes.expert > 1:
        raise PlanError(
            f"{flag} does not go with --expert-model-parallel-size above 1: replicas that share experts would run "
            "different orders; leave one of the two out"
        )
    if settings.vocabulary_parallel:
        raise PlanError(
            f"{flag} does not go with {flags['shared_vocabulary']}: ranks meet over microbatches of one shape; leave "
            "one of the two out"
        )
    if settings.saving != MemorySaving():
        raise PlanError(f"{flag} does not go with {flags['save_memory']} so far: leave one of the two out")
    for other, is_given in ((flags["measure"], settings.measuring is not None), (flags["replan"], settings.replan)):
        if is_given:
            raise PlanError(
                f"{flag} does not go with {other}: every iteration has a plan of its own; measure a job of even "
                f"lengths, and give the costs that it wrote to {flags['costs']}"
            )
    if settings.measures_limit:
        raise PlanError(f"{flag} does not go with {flags['memory_limit']} auto: give a number")


def _fault(facts: Facts, spec: JobSpec, shape: Shape) -> str:
    """Difference between the profile's model and the job's; empty without one."""
    pairs: dict[str, tuple[Any, Any]] = {
        "--num-layers": (facts.layers, len(shape.layers)),
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
