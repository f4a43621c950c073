"""Flags of a job. Training and the command line share their names; only the prefix differs."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.schedules.planner.registry import heeding

TRAINING, COMMAND_LINE = "--pipeline-", "--"
SEARCH_VARIABLE = "MEGATRON_SCHEDULES_SEARCH_SECONDS"
STALL_VARIABLE = "MEGATRON_SCHEDULES_STALL_SECONDS"

# Metavar and help of the flags that training and the command line share.
SHARED = {
    "schedule": (
        "auto|NAME[:CHUNKS]|FILE.csv",
        "Order of the pipeline's passes: auto, a schedule by name, or your own as a compute-only CSV with one row a "
        "rank, as torch.distributed.pipelining writes it. CHUNKS is the number of model chunks a rank: for "
        "interleaved-1f1b exactly (2 without it), for auto and adaptive at most (without it 4, or 8 where a rank may "
        "hold less than one microbatch). More chunks shrink the "
        "bubble and send more messages. A CSV may have R, O and L: all decoder layers of those stages are recomputed "
        "or offloaded.",
    ),
    "memory-limit": (
        "X|GIB|auto",
        f"For {' and '.join(heeding('memory_limit'))}: the most activation memory that a rank may hold. A fraction of "
        "1F1B's, such as 0.5 or "
        "50%, or a size such as 20GiB. 1F1B holds as many microbatches as there are pipeline ranks. Give what your "
        "GPUs have left.",
    ),
    "costs": (
        "F,I,W[,LATENCY[,MESSAGES]]|FILE.json",
        "Times of a forward, an input gradient (the paper's B) and a weight gradient over half a rank's layers, and "
        "P2P latency between ranks, in any unit. MESSAGES is the part of F, and the part of I, that waits for messages "
        "of experts. Or a JSON file: a cost profile that a job (--pipeline-measure) or tools/profile_passes.py wrote, "
        "or one written by hand (docs/measure.md). Measured costs give the best order.",
    ),
    "layers": (
        "even|auto|N,N,...",
        "Decoder layers of each stage. even: all stages alike. auto: the layer partition with the shortest iteration. "
        "N,N,...: the number for each stage, in model order. Without the flag even, but auto for the schedule auto.",
    ),
    "save-memory": (
        "none|recompute|offload[=GB/S]|both[=GB/S]",
        f"For {' and '.join(heeding('recompute'))}: the plan may recompute layers in passes R, offload activations to "
        "host memory in "
        "passes O and L, or both, where that shortens the iteration within the memory limit. GB/S is what a rank "
        "copies one way while the other way is busy; without it the cost file says how long a copy takes.",
    ),
    "vocabulary-parallel": (
        "",
        "Split the embedding and the output layer along the vocabulary over all pipeline ranks. Give it where a large "
        "vocabulary makes the output layer the bottleneck.",
    ),
}


def flags_of(prefix: str) -> Mapping[str, str]:
    """Maps each part of a planning request to its flag, see :meth:`.PlanError.told`."""
    schedule, costs, save = f"{prefix}schedule", f"{prefix}costs", f"{prefix}save-memory"
    return {
        "schedule": schedule,
        "csv": schedule,
        "chunks": schedule,
        "memory_limit": f"{prefix}memory-limit",
        "costs": costs,
        "costs_file": costs,
        "layers": f"{prefix}layers",
        "first_layers": "--decoder-first-pipeline-num-layers",
        "last_layers": "--decoder-last-pipeline-num-layers",
        "save_memory": save,
        "recompute": f"{save} recompute",
        "offload": f"{save} offload",
        "shared_vocabulary": f"{prefix}vocabulary-parallel",
        "search_seconds": f"${SEARCH_VARIABLE}",
        "weight_share": f"{costs} FILE.json $.weight_share",
        "copy": f"{costs} FILE.json $.copy_time",
    }
