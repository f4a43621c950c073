"""Our flags, as Megatron's parser gets them, and which of Megatron's the checks of ours read."""

from __future__ import annotations

import argparse
from typing import Any

from megatron.schedules.estimate import megatron_flags
from megatron.schedules.estimate.layer_pattern import la_freq_type, moe_freq_type, no_rope_freq_type
from megatron.schedules.planner.registry import NAMES, describe

# The flag of each part of a request, and of what else is asked about it.
FLAGS = {
    "schedule": "--pipeline-schedule",
    "ranks": "--pipeline-model-parallel-size",
    "chunks": "--pipeline-schedule-chunks",
    "csv": "--pipeline-schedule-file",
    "costs": "--pipeline-schedule-costs",
    "costs_file": "--pipeline-schedule-costs-file",
    "memory_limit": "--pipeline-memory-limit",
    "search_seconds": "--pipeline-search-seconds",
    "layers": "--pipeline-schedule-layers",
    "stage_weights": "--pipeline-schedule-stage-weights",
    "shared_vocabulary": "--pipeline-vocabulary-parallel",
    "again": "--pipeline-recompute",
    "offload": "--pipeline-offload",
    "plan_lengths": "--pipeline-plan-lengths",
    "stall_seconds": "--pipeline-schedule-stall-seconds",
    "report_memory": "--pipeline-schedule-report-memory",
    "profile_iterations": "--pipeline-profile-iterations",
    "save_costs": "--pipeline-save-costs",
    "timeline": "--pipeline-timeline",
    "dry_run": "--pipeline-dry-run",
    "device_memory": "--device-memory",
    "replan": "--pipeline-replan",
}


def given(args: Any) -> list[str]:
    """The parts of a request for which ``args`` have a flag of ours, beside ``--pipeline-schedule`` itself."""
    ours = (part for part in FLAGS if part not in ("schedule", "ranks"))
    unset = (None, False, "none")
    return [part for part in ours if getattr(args, megatron_flags.attribute(FLAGS[part]), None) not in unset]


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of this package to stock Megatron's parser."""
    group = parser.add_argument_group("pipeline schedule")
    summaries = "; ".join(f"{name}: {describe(name)}" for name in NAMES)
    group.add_argument(
        "--pipeline-schedule",
        metavar="NAME",
        help=f"Order of the pipeline's passes; Megatron's own without the flag. {summaries}.",
    )
    group.add_argument(
        "--pipeline-schedule-file",
        metavar="CSV",
        help="For --pipeline-schedule file: a compute-only CSV in torch.distributed.pipelining's form, one row a rank. "
        "It may have R, O and L too: all decoder layers of those stages are then done again or offloaded.",
    )
    group.add_argument(
        "--pipeline-schedule-chunks",
        metavar="V",
        help="Model chunks a rank, where the schedule leaves that open: for interleaved-1f1b exactly (2 without this "
        "flag), for adaptive at most (4 without it). More of them make the bubble smaller and messages more.",
    )
    group.add_argument(
        "--pipeline-schedule-costs",
        metavar="F,I,W[,COMM]",
        help="Time of a forward, an input gradient (the paper's B), a weight gradient over half a rank's layers, and "
        "P2P latency between ranks, in any unit; by the model's arithmetic without this flag, and no latency. Give "
        "measured ones and the schedule is ordered for them.",
    )
    group.add_argument(
        "--pipeline-schedule-costs-file",
        metavar="JSON",
        help="A cost profile of this model, measured by a job (--pipeline-save-costs) or by tools/profile_passes.py, "
        "in place of --pipeline-schedule-costs: give it for the plan that suits your device.",
    )
    group.add_argument(
        "--pipeline-memory-limit",
        metavar="X",
        help="For --pipeline-schedule adaptive: the most activation memory a rank may hold, as a fraction of 1F1B's, "
        "such as 0.5, or in GiB, such as 20GiB, by Megatron's own estimate of 1F1B's: that of as many microbatches as "
        "pipeline ranks. Give what your GPUs have left beside weights and optimizer, or auto: the job begins within a "
        "third of 1F1B's, measures what is left, and plans again for that (--pipeline-replan is implied).",
    )
    group.add_argument(
        "--pipeline-search-seconds",
        metavar="S",
        help="For --pipeline-schedule adaptive: how long to search, in seconds of a usual core; without it 2 to 100 by "
        "size. Give more for a long run. A plan is searched once and then read from the cache "
        "($MEGATRON_SCHEDULES_CACHE, a directory of yours).",
    )
    group.add_argument(
        "--pipeline-recompute",
        metavar="auto|none",
        help="For --pipeline-schedule adaptive, auto: forwards of some layers may be done again, in passes of their "
        "own; the plan says of how many layers. Give it where memory is short, in place of Megatron's "
        "--recompute-granularity full. none, as without the flag: nothing is done again.",
    )
    group.add_argument(
        "--pipeline-offload",
        metavar="auto|none|GBPS",
        help="For --pipeline-schedule adaptive: activations of some layers may be copied to pinned host memory and "
        "back, beside the computing; the plan says of how many layers, and what the host holds. GBPS is what a rank "
        "copies in a second one way, in GB, the other way being busy too (its part of the link where ranks share one); "
        "auto takes it from --pipeline-schedule-costs-file. Give it where memory is short and hosts have some. none, "
        "as without the flag: nothing is copied, unless --pipeline-schedule file has O and L, whose time it then says.",
    )
    group.add_argument(
        "--pipeline-schedule-layers",
        metavar="auto|even",
        help="auto: each stage gets the number of decoder layers with which the plan is shortest, in place of layout "
        "flags; any number of layers goes, and the job's first lines have the layout. Give it where the vocabulary is "
        "large: an output layer may take as long as several layers. even, as without the flag: all alike.",
    )
    group.add_argument(
        "--pipeline-schedule-stage-weights",
        metavar="X,X,...",
        help="Where some layers take longer, as those beside the embedding and the output layer do: the model cut into "
        "equal slices (as many as stages, or a multiple), how long each takes against the average, in model order.",
    )
    group.add_argument(
        "--pipeline-vocabulary-parallel",
        action="store_true",
        help="Cut the word embedding and the output layer along the vocabulary over all pipeline ranks, each of which "
        "then does its part for every microbatch. Give it where the vocabulary is large: where the output layer takes "
        "longer than a rank's layers can make up for, or the two ends lack memory for their tables. Results stay the "
        "same to rounding, checkpoints fit any other setting.",
    )
    group.add_argument(
        "--pipeline-plan-lengths",
        action="store_true",
        help="Plan every iteration for the lengths of its own microbatches: in which order they come, and when each "
        "pass runs, beside the iteration before. Give it where samples are packed from documents "
        "(--sft, --dataloader-inter-document-masking) or differ in length, above all in long contexts. Gradients of a "
        "step are then added up in the planned order; samples and losses stay those of the step.",
    )
    group.add_argument(
        "--pipeline-schedule-stall-seconds",
        metavar="S",
        help="How long a rank may stand at one pass or message before the job ends with a line that says where; 120 "
        "without this flag. Give more where a pass, or what one rank does between two iterations, may take longer: "
        "large compilations, slow file systems. 0 turns it off, for a debugger.",
    )
    group.add_argument(
        "--pipeline-schedule-report-memory",
        action="store_true",
        help="Print after the first iteration how many bytes each rank held at most, as a GPU's allocator says or, "
        "without one, counted tensor by tensor: to check a plan on your model. Later iterations are not measured.",
    )
    group.add_argument(
        "--pipeline-profile-iterations",
        metavar="A-B",
        help="Iterations, two or more, in which the job measures itself: in A what each pass holds, from then to B how "
        "long each pass, copy and message takes, with events that nobody waits for. A table of it is printed after B. "
        "Give a few of the first ten, such as 5-10, to see where the time goes.",
    )
    group.add_argument(
        "--pipeline-save-costs",
        metavar="JSON",
        help="With --pipeline-profile-iterations: where to write what was measured, for --pipeline-schedule-costs-file "
        "of the next job and megatron-schedules plan --costs-file. Give it to plan for your own costs.",
    )
    group.add_argument(
        "--pipeline-timeline",
        metavar="DIR",
        help="Where to write what happened in the last iteration that is measured, beside what was planned: a page to "
        "open in a browser, an SVG, a trace for Perfetto, and the record for megatron-schedules draw --recorded. "
        "Iterations 3-5 are measured unless --pipeline-profile-iterations says otherwise. Give it to see why a bubble "
        "is as large as it is.",
    )
    group.add_argument(
        "--pipeline-dry-run",
        nargs="?",
        const="",
        metavar="GPUS",
        help="Print the plan, the layers of each stage and the memory of each rank in GiB, and stop: before a job "
        "waits for its GPUs, also without torchrun and without a GPU. GPUS is how many the job would have, where "
        "neither torchrun nor SLURM says it. Ends with status 3 where --device-memory is given and not enough.",
    )
    group.add_argument(
        "--device-memory",
        metavar="GIB",
        help="For --pipeline-dry-run: the memory of one GPU, such as 80GiB; says which rank holds most, whether that "
        "fits, and what would make it fit.",
    )
    group.add_argument(
        "--pipeline-replan",
        action="store_true",
        help="Plan again, beside the running iterations, for what the job has measured of itself (iterations 3 to 8, "
        "or --pipeline-profile-iterations), and run the new order from one iteration on if it is shorter; again where "
        "a rank or the messages between two become slow. Losses stay the same. Give it in long jobs.",
    )
    return parser


def mend_help(parser: argparse.ArgumentParser) -> None:
    """Make ``--help`` print: some stock flags have a percent sign in their help that argparse takes for a format."""
    for action in parser._actions:
        try:
            _ = (action.help or "") % {**vars(action), "prog": parser.prog}
        except (ValueError, TypeError, KeyError):
            action.help = str(action.help).replace("%", "%%")


# Those of Megatron's flags that our checks read: kind of value and what it is without the flag.
STOCK: megatron_flags.Flags = {
    **megatron_flags.FLAGS,
    "--ckpt-format": (str, "torch_dist"),
    "--cuda-graph-impl": (str, "none"),
    "--dataloader-inter-document-masking": (None, False),
    "--dataloader-type": (str, None),
    "--decoder-first-pipeline-num-layers": (int, None),
    "--decoder-last-pipeline-num-layers": (int, None),
    "--defer-embedding-wgrad-compute": (None, False),
    "--delay-wgrad-compute": (None, False),
    "--enable-cuda-graph": (None, False),
    "--external-cuda-graph": (None, False),
    "--fine-grained-activation-offloading": (None, False),
    "--fp4-format": (str, None),
    "--fp8-format": (str, None),
    "--hybrid-layer-pattern": (str, None),
    "--init-model-with-meta-device": (None, False),
    "--linear-attention-freq": (la_freq_type, None),
    "--moe-expert-rank-capacity-factor": (float, None),
    "--moe-paged-stash": (None, False),
    "--no-rope-freq": (no_rope_freq_type, None),
    "--num-layers-per-virtual-pipeline-stage": (int, None),
    "--num-virtual-stages-per-pipeline-rank": (int, None),
    "--overlap-dispatch-backward-with-experts-wgrad": (None, False),
    "--overlap-moe-expert-parallel-comm": (None, False),
    "--phase-transition-iterations": (str, None),
    "--pipeline-model-parallel-layout": (str, None),
    "--pipeline-model-parallel-size": (int, 1),
    "--sft": (None, False),
    "--step-batch-size-schedule": (str, None),
    "--te-precision-config-file": (str, None),
    "--te-rng-tracker": (None, False),
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
_NAMED_OTHERWISE = {
    **megatron_flags.NAMED_OTHERWISE,
    "--fp4-format": "fp4",
    "--fp8-format": "fp8",
}


def add_stock_arguments(parser: argparse.ArgumentParser) -> None:
    """Add those of :data:`STOCK`, for a parser that runs before Megatron's own can be made."""
    megatron_flags.declare(parser, STOCK, _NAMED_OTHERWISE)
