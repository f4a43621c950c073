"""Replacements in ``megatron.core``, each with its reason. They serve every training loop.

:mod:`.hooks` has those in ``megatron.training``. Without a schedule each replacement only calls the original.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies import fully_parallel
from megatron.core.distributed import distributed_data_parallel
from megatron.core.models.common.language_module import language_module
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.package_info import __shortversion__
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel import utils as pipeline_utils
from megatron.core.rerun_state_machine import RerunStateMachine
from megatron.core.ssm.mamba_hybrid_layer_allocation import select_pipeline_segment
from megatron.core.transformer import TransformerConfig, cuda_graphs
from megatron.core.transformer.moe import fused_a2a, token_dispatcher
from megatron.core.utils import is_te_min_version

try:
    from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker
except ImportError:  # some versions have no such class
    MoEMetricsTracker = None
from torch import Tensor

from megatron.schedules.integration import checkpoints
from megatron.schedules.integration.expert_messages import ExpertMessages, HybridBuffer, reset_stocks_own
from megatron.schedules.integration.flags.configuration import HIDES_MESSAGES
from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.integration.gpu_libraries import GRAPHS_OF_STOCK
from megatron.schedules.integration.graphs.order import one_by_one
from megatron.schedules.integration.layers import tied
from megatron.schedules.integration.linears.fused_accumulation import fuse_without_apex
from megatron.schedules.integration.loops import hybrid_stage, place_layers, schedule_function
from megatron.schedules.integration.refuse import refuse
from megatron.schedules.integration.schedule_function import listed
from megatron.schedules.integration.session import Hook, Session, Stock, put_in


def _forward_backward(stock: Stock, session: Session, *args: Any, **kwargs: Any) -> Any:
    function = schedule_function(session, kwargs)
    return stock(*args, **kwargs) if function is None else function(*args, **kwargs)


def _validate_result(
    stock: Stock, session: Session, machine: RerunStateMachine, result: Any, *args: Any, **kwargs: Any
) -> None:
    if session.late_checks.waiting and isinstance(result, Tensor):
        # Copies the current value, because stock later scales the loss in place.
        result = result.detach().clone()
    session.late_checks.add(functools.partial(stock, machine, result, *args, **kwargs))


def _is_pipeline_end(end: int) -> Stock:
    """Returns the replacement of stock's question for the first stage (``end`` 0) or the last (1)."""

    def asked(stock: Stock, session: Session, ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
        if session.stock_is_wrong(ignore_virtual):
            return session.first_and_last(vp_stage)[end]
        return bool(stock(ignore_virtual=ignore_virtual, vp_stage=vp_stage))

    return asked


def _is_pp_last_stage(stock: Stock, session: Session, pp_group: Any) -> bool:
    # Until training begins, a question about the last rank is about the output layer, not about results.
    if session.stock_is_wrong(ignore_virtual=session.planner is not None):
        return session.first_and_last(-1)[1]
    return bool(stock(pp_group))


def _select_pipeline_segment(
    stock: Stock, session: Session, pattern: str, pp_group: Any, vp_stage: int | None, *args: Any, **kwargs: Any
) -> tuple[list[str], int]:
    segment: tuple[list[str], int] | None = hybrid_stage(session, pattern, vp_stage)
    return segment or stock(pattern, pp_group, vp_stage, *args, **kwargs)


def _config_made(stock: Stock, session: Session, config: TransformerConfig) -> None:
    if session.plan is None and session.has_schedule and reset_stocks_own(config):
        # Kept by copies of the configuration. Some loops call this several times.
        setattr(config, HIDES_MESSAGES, True)
    stock(config)
    if session.plan is None:
        place_layers(session, config)
    if session.has_schedule and config.gradient_accumulation_fusion:
        fuse_without_apex()


def _te_parallel_cross_entropy(
    stock: Stock, session: Session, logits: Tensor, labels: Tensor, group: Any, for_graphs: bool = False
) -> Any:
    # Later versions never wait, and warn about the argument; those before 2.7 do not have it.
    return stock(logits, labels, group, for_graphs or (session.planner is not None and not is_te_min_version("2.20.0")))


def _sent_by(method: Callable[..., Any]) -> Stock:
    """Returns the replacement of a message of stock's by one of :class:`.ExpertMessages`."""
    return lambda stock, session, *args, **kwargs: method(session.expert_messages, stock, *args, **kwargs)


def _get_buffer(stock: Stock, session: Session, *args: Any, **kwargs: Any) -> Any:
    return session.expert_messages.through(stock(*args, **kwargs))


def _init_hybrid_ep_buffer(stock: Stock, session: Session, *args: Any, **kwargs: Any) -> None:
    stock(*args, **kwargs)
    fused_a2a._hybrid_ep_buffer = HybridBuffer(fused_a2a._hybrid_ep_buffer, session.expert_messages)


def _initialize_model_parallel(stock: Stock, session: Session, *args: Any, **kwargs: Any) -> None:
    own = kwargs.get("get_embedding_ranks")
    if own is not None:
        kwargs["get_embedding_ranks"] = functools.partial(_default_embedding_ranks, own, session)
    stock(*args, **kwargs)


def _default_embedding_ranks(stock: Stock, session: Session, pp_ranks: list[int]) -> list[int]:
    placement = session.placement(len(pp_ranks), parallel_state.get_virtual_pipeline_model_parallel_world_size())
    in_v = placement is not None and placement.rank_of[-1] == 0
    return [pp_ranks[0]] if in_v or session.two_copies else list(stock(pp_ranks))


def _embeddings_set_up(stock: Stock, session: Session, chunk: LanguageModule) -> None:
    here = session.plan is None and session.two_copies  # Megatron-LM's loop does so when it has built all chunks
    copied = chunk.share_embeddings_and_output_weights or chunk.config.mtp_num_layers
    tied_group = chunk.embd_group if copied else None
    if here and tied_group is not None and tied_group.size() > 1:
        refuse(
            f"{FLAGS['schedule']} has both copies of a tied embedding on one rank: initialize parallel_state after "
            "megatron.schedules.install()"
        )
    stock(chunk)
    if here:
        if chunk.pre_process:
            session.first_chunk = weakref.ref(chunk)
        elif session.first_chunk is not None and (first := session.first_chunk()) is not None:
            tied.start_equal((first, chunk))


def _partition_buckets(
    stock: Stock, session: Session, buffers: Any, force_single_bucket_group: bool = False, **kwargs: Any
) -> Any:
    # A sum in fp32 is taken of one bucket. The results do not depend on how buckets are grouped.
    config = buffers[0].ddp_config if session.has_schedule and buffers else None
    one = getattr(config, "reduce_scatter_with_fp32_accumulation", False)  # 0.17 has no such field
    return stock(buffers, force_single_bucket_group=force_single_bucket_group and not one, **kwargs)


def _create_cudagraphs(stock: Stock, session: Session, helper: Any) -> None:
    sizes = {"num_microbatches": get_num_microbatches(), "seq_length": helper.seq_length}
    call = {"model": helper.model, "micro_batch_size": helper.micro_batch_size, "forward_only": False, **sizes}
    job: Any = schedule_function(session, call)
    if job is None:
        stock(helper)
        return
    with job.capturing(listed(helper.model), sizes["num_microbatches"]) as session.capture:
        stock(helper)
    session.capture = None


def _make_graphed_callables(stock: Stock, session: Session, *args: Any, **kwargs: Any) -> Any:
    return stock(*args, **kwargs) if session.capture is None else session.capture.make(stock, *args, **kwargs)


def _convert_schedule_table_to_order(
    stock: Stock, session: Session, warmup: int, chunks: int, table: Sequence[Any]
) -> list[int]:
    if session.capture is None:
        return list(stock(warmup, chunks, table))
    return one_by_one(chunks, len(table) // chunks)


def _ensure_initialized(
    stock: Stock, session: Session, tracker: Any, name: str, num_layers: int, *args: Any, **kwargs: Any
) -> None:
    # Ranks with experts have a value for each layer of the model, and all ranks add them up.
    stock(tracker, name, max(num_layers, session.layers), *args, **kwargs)


_WAITS = "stock waits for each message of experts as soon as it has started: weight gradients can run behind it"
_CHOSEN = "get_forward_backward_func looks it up when it is called, so names imported earlier are served too"

CORE_HOOKS: tuple[Hook, ...] = (
    Hook(schedules, "forward_backward_pipelining_without_interleaving", _CHOSEN, _forward_backward),
    Hook(schedules, "forward_backward_pipelining_with_interleaving", _CHOSEN, _forward_backward),
    Hook(schedules, "forward_backward_no_pipelining", "a schedule without a pipeline is refused", _forward_backward),
    Hook(
        RerunStateMachine,
        "validate_result",
        "scripts look for NaN in each loss, and reading one waits for the device: read when all passes are queued",
        _validate_result,
    ),
    Hook(parallel_state, "is_pipeline_first_stage", "scripts ask it for a chunk's data", _is_pipeline_end(0)),
    Hook(parallel_state, "is_pipeline_last_stage", "scripts ask it where the loss is", _is_pipeline_end(1)),
    Hook(pipeline_utils, "is_pp_last_stage", "the same, in newer loops", _is_pp_last_stage),
    Hook(
        TransformerConfig,
        "__post_init__",
        "stock's places of layers, if a loop has no arguments; its fusion that asks for Apex",
        _config_made,
    ),
    Hook(
        sys.modules[select_pipeline_segment.__module__],  # models import it from there; where it is depends on version
        "select_pipeline_segment",
        "stock numbers a hybrid model's stages round the ranks, and divides layers only over stages of one a rank",
        _select_pipeline_segment,
    ),
    Hook(
        language_module,
        "te_parallel_cross_entropy",
        "its backward copies a number to the GPU and waits, unless it must work in CUDA graphs",
        _te_parallel_cross_entropy,
    ),
    Hook(token_dispatcher, "all_to_all", _WAITS, _sent_by(ExpertMessages.send)),
    Hook(token_dispatcher, "gather_from_sequence_parallel_region", _WAITS, _sent_by(ExpertMessages.gather)),
    Hook(token_dispatcher, "reduce_scatter_to_sequence_parallel_region", _WAITS, _sent_by(ExpertMessages.scatter)),
    Hook(fused_a2a, "get_buffer", f"{_WAITS} (DeepEP)", _get_buffer),
    Hook(fused_a2a, "init_hybrid_ep_buffer", "HybridEP sends on the stream that computes", _init_hybrid_ep_buffer),
    Hook(
        distributed_data_parallel,
        "partition_buckets",
        "stock groups all buckets of a chunk after the first, and cannot sum the gradients of a group in fp32",
        _partition_buckets,
    ),
    Hook(
        parallel_state,
        "default_embedding_ranks",
        "with both copies of a tied embedding on one rank there is no group to reduce over",
        _default_embedding_ranks,
    ),
    Hook(parallel_state, "initialize_model_parallel", "the same, if a loop has its own", _initialize_model_parallel),
    Hook(
        LanguageModule,
        "setup_embeddings_and_output_layer",
        "stock fills the second copy of a tied embedding from another rank",
        _embeddings_set_up,
    ),
    Hook(
        fully_parallel,
        "distribute_main_replicas_with_precomputed_distribution",
        "a rank with both copies of a tied embedding would write it twice",
        checkpoints.for_two_copies(checkpoints.write_once),
    ),
    Hook(
        fully_parallel,
        "_fill_in_deferred_sharded_items",
        "both copies of a tied embedding would share one optimizer state",
        checkpoints.for_two_copies(checkpoints.own_tensors),
    ),
)
if MoEMetricsTracker is not None:  # otherwise such models are refused
    CORE_HOOKS += (
        Hook(
            MoEMetricsTracker,
            "ensure_initialized",
            "on ranks of a hybrid model without experts stock has too few values to add to those of other ranks",
            _ensure_initialized,
        ),
    )
if all(hasattr(cuda_graphs, name) for name in GRAPHS_OF_STOCK):  # otherwise such graphs are refused
    CORE_HOOKS += (
        Hook(
            cuda_graphs.TECudaGraphHelper,
            "create_cudagraphs",
            "stock captures graphs in the order of its own schedules; microbatches replay them in slots of the plan",
            _create_cudagraphs,
        ),
        Hook(
            cuda_graphs,
            "convert_schedule_table_to_order",
            "stock allocates static inputs in that order, which assumes that backwards come in the order of forwards",
            _convert_schedule_table_to_order,
        ),
        Hook(
            cuda_graphs,
            "make_graphed_callables",
            "stock has no graph of W that a plan can place, nor copies of what W reads from memory that graphs share",
            _make_graphed_callables,
        ),
    )


def install(arguments: Mapping[str, Any]) -> None:
    """Installs the hooks in ``megatron.core`` alone, where the training loop that came with it is not ours to hook.

    Args:
        arguments: arguments of :func:`megatron.schedules.install`, by name.
    """
    if any(word.startswith(FLAGS["schedule"]) for word in sys.argv):
        refuse(
            f"{FLAGS['schedule']} is a flag of Megatron-LM's training loop from megatron-core 0.18 on, and this is "
            f"{__shortversion__}; other loops take $PIPELINE_SCHEDULE (docs/loops.md)"
        )
    put_in(CORE_HOOKS, Session(arguments))
