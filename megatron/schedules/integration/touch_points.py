"""What is relied on in Megatron and Transformer Engine besides imports and hooks, as data.

Imports, private names and hooks are read from the source (``tools/_touched.py``). These two tables hold what cannot be:
attributes that are replaced on single objects, and stock's functions whose work is repeated here. ``python -m
tools.drift`` compares all of them with another version.
"""

from __future__ import annotations

import re
from typing import NamedTuple

NEWEST = "0.19.2"
"""The newest megatron-core that all of this was compared with, see ``tools/fingerprints``."""


class Patched(NamedTuple):
    """Attribute of stock's that is replaced on single objects, not on the class.

    Args:
        name: dotted path in stock.
        where: file in this package.
        why: reason.
    """

    name: str
    where: str
    why: str


class Repeated(NamedTuple):
    """Function of stock's that is repeated, or called in its place.

    Args:
        name: dotted path in stock.
        where: file in this package.
        knows: all parameters that are understood. A further one is a broken contract: it may change the result.
    """

    name: str
    where: str
    knows: frozenset[str]


_LAYERS = "megatron.core.tensor_parallel.layers"
_LINEAR = (
    "input weight bias gradient_accumulation_fusion allreduce_dgrad sequence_parallel grad_output_buffer "
    "wgrad_deferral_limit tp_group gtp_remat_size output_dtype"
)

PATCHED = (
    Patched(f"{_LAYERS}.ColumnParallelLinear._forward_impl", "linears/local.py", "chooses between whole and split"),
    Patched(f"{_LAYERS}.RowParallelLinear._forward_impl", "linears/local.py", "chooses between whole and split"),
    Patched(
        "megatron.core.transformer.moe.router.TopKRouter.routing",
        "model_binding.py",
        "a recomputed forward sends tokens to the experts that the first chose",
    ),
    Patched(
        "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup.register_grad_ready",
        "gradient_reduction.py",
        "reductions start in the order and at the pace of the plan",
    ),
    Patched(
        "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup.is_first_batch",
        "gradient_reduction.py",
        "stock would count hooks in its first batch and reduce again",
    ),
    Patched("megatron.core.timers.Timer._started", "host_waits.py", "events in place of waits for the GPU"),
    Patched(
        "megatron.core.models.gpt.gpt_model.GPTModel.compute_language_model_loss",
        "vocabulary/parts.py",
        "the loss of an output layer that all ranks share",
    ),
    Patched(
        "megatron.core.models.gpt.gpt_model.GPTModel.tie_embeddings_and_output_weights_state_dict",
        "vocabulary/parts.py",
        "each rank saves its own part",
    ),
)

REPEATED = (
    Repeated(
        f"{_LAYERS}.LinearWithGradAccumulationAndAsyncCommunication.forward",
        "linears/local.py",
        frozenset(f"ctx {_LINEAR}".split()),
    ),
    Repeated(
        f"{_LAYERS}.linear_with_grad_accumulation_and_async_allreduce",
        "linears/local.py",
        frozenset(_LINEAR.split()),
    ),
    Repeated(
        f"{_LAYERS}.LinearWithGradAccumulationAndAsyncCommunication.backward",
        "linears/local.py",
        frozenset({"ctx", "grad_output"}),
    ),
)


def is_newer(version: str) -> bool:
    """Returns whether ``version`` is of a later minor version than :data:`NEWEST`. Patch releases change little."""
    return minor(version) > minor(NEWEST)


def minor(version: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
