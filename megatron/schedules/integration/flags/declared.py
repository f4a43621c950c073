"""Our flags as added to Megatron's parser, the Megatron flags that our checks read, and settings without flags."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from megatron.schedules.estimate import megatron_flags
from megatron.schedules.estimate.layer_pattern import la_freq_type, moe_freq_type, no_rope_freq_type
from megatron.schedules.integration.refuse import refuse
from megatron.schedules.job.flags import SHARED, STALL_VARIABLE, TRAINING, flags_of
from megatron.schedules.planner.registry import WRITTEN, describe

# Flag of each part of a request, and of other settings.
FLAGS = {
    **flags_of(TRAINING),
    "ranks": "--pipeline-model-parallel-size",
    "plan_lengths": "--pipeline-plan-lengths",
    "measure": "--pipeline-measure",
    "replan": "--pipeline-replan",
    "verify": "--pipeline-verify",
    "dry_run": "--pipeline-dry-run",
    "stall_seconds": f"${STALL_VARIABLE}",
}
_SWITCHES = {
    "plan-lengths": "Plan every iteration for the lengths of its own microbatches: their order, and when each pass "
    "runs. Planned in the background, an iteration ahead. Give it where samples are packed from documents "
    "(--sft, --dataloader-inter-document-masking) or differ in length, above all in long contexts. Gradients of a "
    "step are added up in the planned order; samples and losses stay those of the step.",
    "replan": "Plan again, in the background, for the costs that the job has measured of itself (iterations 3 to 8, or "
    "those of --pipeline-measure), and switch to the new order if it is shorter; again where a rank or the messages "
    "between two become slow. Losses stay the same. Give it in long jobs. --pipeline-schedule auto without "
    "--pipeline-costs measures too, and only says what a new plan would gain.",
    "verify": "Prove that the schedule gives the right gradients, and stop: run the first iteration twice on the same "
    "samples and weights, as planned and with each I and W as one whole backward, compare each parameter's gradient "
    "and the loss on all ranks, and print a table. Ends with status 0 if they are equal, else with 1.",
}
# Help text for flags that the command line also has, for training only.
_IN_TRAINING = {
    "schedule": "Megatron's own schedule without the flag. "
    + "; ".join(f"{written}: {describe(name)}" for written, name in WRITTEN.items()),
    "memory-limit": "GiB count as a dry run does. --pipeline-schedule auto takes what GPUs have left beside weights "
    "and optimizer without this flag. auto: the job begins within a third of 1F1B's, measures what is "
    "left, and plans again for that (--pipeline-replan is implied).",
    "costs": "Without this flag costs follow from the model's arithmetic.",
    "layers": "auto and N,N,... replace Megatron's layout flags; the job's first lines have the layout.",
    "save-memory": "Use recompute in place of --recompute-granularity full. GB/S needs costs in milliseconds.",
    "vocabulary-parallel": "Results stay the same to rounding, and checkpoints fit any other setting.",
}
OURS = tuple(f"{TRAINING}{word}" for word in (*list(_IN_TRAINING)[1:], *_SWITCHES, "measure", "dry-run"))
"""Our flags, but for that of the schedule."""


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the flags of this package to stock Megatron's parser."""
    group = parser.add_argument_group("pipeline schedule")
    for word, more in _IN_TRAINING.items():
        metavar, text = SHARED[word]
        if metavar:
            group.add_argument(f"{TRAINING}{word}", metavar=metavar, help=f"{text} {more}")
        else:
            group.add_argument(f"{TRAINING}{word}", action="store_true", help=f"{text} {more}")
    for word, text in _SWITCHES.items():
        group.add_argument(f"{TRAINING}{word}", action="store_true", help=text)
    group.add_argument(
        FLAGS["measure"],
        metavar="DIR[:A-B]",
        help="Measure the job itself: in iteration A how much memory each pass holds, from then to B how long each "
        "pass, copy and message takes, with events that nobody waits for. Prints a table after B, and the bytes that "
        "each rank held. Writes into DIR: costs.json for --pipeline-costs of the next job, and iteration B beside "
        "its plan as a page, an SVG, a trace for Perfetto and recorded.json for megatron-schedules draw --recorded. "
        "Iterations 3-5 without :A-B.",
    )
    group.add_argument(
        FLAGS["dry_run"],
        nargs="?",
        const="",
        metavar="[GPUS][xGIB|xGPU]",
        help="Print the plan, the layers of each stage and the memory of each rank, and stop: also without torchrun "
        "and without a GPU. GPUS is the number of GPUs of the job, where neither torchrun nor SLURM says it. With the "
        "memory of one GPU, such as 64x80GiB or x80GiB, prints whether the job fits and what would make it fit; ends "
        "with status 3 where it does not. With the name of the GPU, such as 64xH100, estimates the time too.",
    )
    return parser


def mend_help(parser: argparse.ArgumentParser) -> None:
    """Makes ``--help`` print: the help of some stock flags has a percent sign that argparse reads as a format."""
    for action in parser._actions:
        try:
            _ = (action.help or "") % {**vars(action), "prog": parser.prog}
        except (ValueError, TypeError, KeyError):
            action.help = str(action.help).replace("%", "%%")


# Megatron's flags that our checks read, with their type and default.
STOCK: megatron_flags.Flags = {
    **megatron_flags.FLAGS,
    "--ckpt-convert-format": (str, None),
    "--ckpt-format": (str, "torch_dist"),
    "--cuda-graph-impl": (str, "none"),
    "--cuda-graph-warmup-steps": (int, 3),
    "--dataloader-inter-document-masking": (None, False),
    "--dataloader-type": (str, None),
    "--decoder-first-pipeline-num-layers": (int, None),
    "--decoder-last-pipeline-num-layers": (int, None),
    "--defer-embedding-wgrad-compute": (None, False),
    "--delay-wgrad-compute": (None, False),
    "--enable-cuda-graph": (None, False),
    "--external-cuda-graph": (None, False),
    "--fine-grained-activation-offloading": (None, False),
    "--fp4-param-gather": (None, False),
    "--fp4-quantizer-factory": (str, None),
    "--fp8-param-gather": (None, False),
    "--init-model-with-meta-device": (None, False),
    "--inprocess-restart": (None, False),
    "--linear-attention-freq": (la_freq_type, None),
    "--moe-aux-loss-coeff": ((float, "+"), 0.0),
    "--moe-expert-rank-capacity-factor": (float, None),
    "--moe-pad-expert-input-to-capacity": (None, False),
    "--moe-paged-stash": (None, False),
    "--moe-shared-expert-overlap": (None, False),
    "--moe-z-loss-coeff": (float, None),
    "--no-rope-freq": (no_rope_freq_type, None),
    "--num-layers-per-virtual-pipeline-stage": (int, None),
    "--num-virtual-stages-per-pipeline-rank": (int, None),
    "--overlap-dispatch-backward-with-experts-wgrad": (None, False),
    "--overlap-moe-expert-parallel-comm": (None, False),
    "--phase-transition-iterations": (str, None),
    "--pipeline-model-parallel-layout": (str, None),
    "--pipeline-model-parallel-size": (int, 1),
    "--rampup-batch-size": ((int, 3), None),
    "--sft": (None, False),
    "--step-batch-size-schedule": (str, None),
    "--te-precision-config-file": (str, None),
    "--te-rng-tracker": (None, False),
    "--timing-log-level": (int, 0),
    "--tp-comm-overlap": (None, False),
    "--train-iters": (int, None),
    "--use-checkpoint-args": (None, False),
    "--use-megatron-fsdp": (None, False),
    "--use-mup": (None, False),
    "--use-torch-fsdp2": (None, False),
    "--use-transformer-engine-op-fuser": (None, False),
    "--window-attn-skip-freq": (moe_freq_type, None),
    "--yaml-cfg": (str, None),
}


def stock_parser(parser: argparse.ArgumentParser | None = None) -> argparse.ArgumentParser:
    """Returns a parser of our flags and of :data:`STOCK`, for use before Megatron's own parser can be made.

    Args:
        parser: an empty parser to add them to.
    """
    parser = parser or argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    megatron_flags.declare(parser, STOCK, megatron_flags.NAMED_OTHERWISE)
    return add_arguments(parser)


# Arguments whose field in the configuration has another name.
FIELDS = {
    "bias_swiglu_fusion": "bias_activation_fusion",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "fp4_param_gather": "fp4_param",
    "fp8_param_gather": "fp8_param",
    "num_experts": "num_moe_experts",
    "swiglu": "gated_linear_unit",
    "te_rng_tracker": "use_te_rng_tracker",
}
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def layout_text(stages: Iterable[Iterable[Any]]) -> str:
    """Writes a layout as ``--pipeline-model-parallel-layout`` does.

    Args:
        stages: for each stage its layers: members of Megatron's ``LayerType``, or their names.
    """
    return "|".join("".join(_LETTERS[str(getattr(layer, "name", layer))] for layer in stage) for stage in stages)


_SWITCH = {"1": True, "0": False}
# A dry run reads Megatron's flags, so it is asked for by one too.
_BY_FLAG_ONLY = ("help", "pipeline_dry_run")


def settings_without_flags(arguments: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Returns these settings, by the attribute of their flag in Megatron's arguments.

    The variable of ``--pipeline-memory-limit`` is ``$PIPELINE_MEMORY_LIMIT``. An empty variable counts as unset, and a
    switch takes 1 or 0; with another value the process exits with status 2. Arguments go before variables.

    Args:
        arguments: arguments of ``install()``, by name.
    """
    settings: dict[str, Any] = {}
    for action in add_arguments(argparse.ArgumentParser())._actions:
        name = action.dest
        if name in _BY_FLAG_ONLY:
            continue
        argument, variable = arguments.get(name.removeprefix("pipeline_")), name.upper()
        text, is_switch = os.environ.get(variable), action.nargs == 0
        if argument not in (None, False):
            settings[name] = True if is_switch else str(argument)
        elif text and is_switch and text not in _SWITCH:
            refuse(f"${variable} must be 1 or 0, not {text!r}")
        elif text:
            settings[name] = _SWITCH[text] if is_switch else text
    return settings
