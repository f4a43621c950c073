"""Reads the job of a loop without Megatron-LM's arguments: from its model, its process groups and its first call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron.schedules.estimate.build import Adapters
from megatron.schedules.estimate.build_flags import STREAMS
from megatron.schedules.integration.expert_messages import STOCKS_OWN
from megatron.schedules.integration.flags.arguments import RunFlags, run_flags
from megatron.schedules.integration.flags.checks import checked
from megatron.schedules.integration.flags.declared import FIELDS, FLAGS, layout_text, stock_parser
from megatron.schedules.integration.layers.layout import PlacedLayout
from megatron.schedules.integration.refuse import refuse
from megatron.schedules.job.spec import JobSpec

# Attribute of a configuration that asked stock to hide experts' messages, which the schedule then does.
HIDES_MESSAGES = "pipeline_schedule_hides_messages"
# Schedules that take as many chunks as the loop has built.
_ANY_CHUNKS = ("adaptive", "auto", "interleaved-1f1b")
# Fields that our parser does not declare and that checks and estimates read.
_MORE = ("attention_backend", "cuda_graph_modules", "variable_seq_lengths", *chain(*STREAMS.items()))
# Tokens of a microbatch for planning, where the call does not say how long its samples are.
_USUAL_LENGTH = 4096
# Module of a linear with the weights of its adapter.
_ADAPTER = ".adapter."
# A loop does not say when it ends.
_ENDLESS = 10**12


def loop_job(
    settings: Mapping[str, Any], chunks: Sequence[torch.nn.Module], call: Mapping[str, Any]
) -> tuple[JobSpec, RunFlags]:
    """Returns the job that trains this model, checked, and what its training reads. Collective over all ranks.

    All ranks get the job of the rank with most microbatches, so that their plans are equal.

    Args:
        settings: our settings, by the attribute of their flag.
        chunks: the model's chunks on this rank.
        call: arguments of the first call of the schedule function.
    """
    config = get_model_config(chunks[0])
    _refuse_what_comes_too_late(settings, config)
    defaults = vars(stock_parser().parse_args([]))
    values = defaults | _of_fields(config, defaults) | _sizes(call, config) | _model(chunks, config)
    values |= {**_optimizer(chunks[0]), **_run(), **settings}
    values["pipeline_layers"] = "even"  # the layout says where layers were placed
    values["overlap_moe_expert_parallel_comm"] = getattr(config, HIDES_MESSAGES, False)
    if values["pipeline_schedule"] in _ANY_CHUNKS:
        values["pipeline_schedule"] += f":{len(chunks)}"
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, values)
    most = SimpleNamespace(**max(of_ranks, key=lambda rank: rank["global_batch_size"]))
    most.adapters = next((rank["adapters"] for rank in of_ranks if rank["adapters"]), None)  # a rank may have no layer
    spec = checked(most, is_built=True)
    assert spec is not None, "a schedule is given"
    return spec, run_flags(most)


def _of_fields(config: Any, names: Iterable[str]) -> dict[str, Any]:
    """Returns the settings of these names that a configuration has, by the attribute of Megatron-LM's flag."""
    fields = {name: getattr(config, FIELDS.get(name, name), None) for name in (*names, *_MORE)}
    return {
        name: value.value if isinstance(value, Enum) and name not in _MORE else value
        for name, value in fields.items()
        if value is not None
    }


def _refuse_what_comes_too_late(settings: Mapping[str, Any], config: Any) -> None:
    """Refuses settings that change how the model is built, which is too late, or read Megatron-LM's data loader."""
    layers = settings.get("pipeline_layers")
    late = {
        "shared_vocabulary": settings.get("pipeline_vocabulary_parallel"),
        "plan_lengths": settings.get("pipeline_plan_lengths"),
        "layers": layers == "auto",
    }
    for part, is_given in late.items():
        if is_given:
            refuse(f"{FLAGS[part]} works in Megatron-LM's own training loop only: leave it out (docs/loops.md)")
    if layers not in (None, "even") and not isinstance(config.pipeline_model_parallel_layout, PlacedLayout):
        refuse(f"{FLAGS['layers']} {layers} needs a schedule such as v-half in this loop: leave it out")
    for field in STOCKS_OWN:
        if getattr(config, field, False):
            refuse(f"{field} was set after the configuration was made, when layers may be built for it: set it before")


def _sizes(call: Mapping[str, Any], config: Any) -> dict[str, Any]:
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    pipeline = parallel_state.get_pipeline_model_parallel_world_size()
    context = parallel_state.get_context_parallel_world_size()
    world, micro = dist.get_world_size(), call["micro_batch_size"]
    length = call.get("decoder_seq_length") or call["seq_length"]
    return {
        "world_size": world,
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "context_parallel_size": context,
        "micro_batch_size": micro,
        "global_batch_size": call["num_microbatches"] * micro * (world // (tensor * pipeline * context)),
        "seq_length": _USUAL_LENGTH if config.variable_seq_lengths and length == 1 else length,
    }


def _model(chunks: Sequence[torch.nn.Module], config: Any) -> dict[str, Any]:
    modules = [module for chunk in chunks for module in chunk.modules()]
    words = next(
        (module for module in modules if hasattr(module, "vocab_size") and hasattr(module, "max_sequence_length")), None
    )
    engine = any(type(module).__module__.startswith("transformer_engine.") for module in modules)
    layout = config.pipeline_model_parallel_layout
    return {
        "padded_vocab_size": getattr(words, "vocab_size", None),
        "max_position_embeddings": getattr(words, "max_sequence_length", None),
        "position_embedding_type": getattr(words, "position_embedding_type", "rope"),
        "hybrid_layer_pattern": getattr(words, "hybrid_layer_pattern", None),
        "logit_dtype": getattr(words, "logit_dtype", None),
        "group_query_attention": config.num_query_groups not in (None, config.num_attention_heads),
        "transformer_impl": "transformer_engine" if engine else "local",
        "create_attention_mask_in_dataloader": not engine,
        "pipeline_model_parallel_layout": None if layout is None else written_layout(layout),
        "adapters": adapters_of(chunks),
        "bf16": config.params_dtype is torch.bfloat16,
        "fp16": config.params_dtype is torch.float16,
    }


def adapters_of(chunks: Sequence[torch.nn.Module]) -> Adapters | None:
    """Returns the low-rank adapters in modules called ``adapter``; None if anything else is trained."""
    named = [each for chunk in chunks for each in chunk.named_parameters()]
    trained = [name.partition(_ADAPTER) + (weight.shape,) for name, weight in named if weight.requires_grad]
    if not trained or not all(found for _, found, *_ in trained):
        return None
    rank = max(min(shape) for *_, shape in trained)
    return Adapters(rank, frozenset(linear.rpartition(".")[-1] for linear, *_ in trained))


def written_layout(layout: Any) -> str:
    """Writes a layout of Megatron's or ours as Megatron's flag does."""
    if isinstance(layout, PlacedLayout):
        stages = [layout.of_stage(stage) for stage in range(layout.placement.stages)]
    else:
        stages = [stage for chunk in zip(*layout.layout, strict=True) for stage in chunk]
    return layout_text(stages)


def _optimizer(chunk: Any) -> dict[str, Any]:
    """Optimizer settings in data parallelism's configuration; empty without it."""
    ddp = getattr(chunk, "ddp_config", None)
    if ddp is None:
        return {}
    return {
        "use_distributed_optimizer": ddp.use_distributed_optimizer,
        "accumulate_allreduce_grads_in_fp32": ddp.grad_reduce_in_fp32,
        "num_distributed_optimizer_instances": ddp.num_distributed_optimizer_instances,
        "use_megatron_fsdp": ddp.use_megatron_fsdp,
    }


def _run() -> dict[str, Any]:
    """Returns settings for the begin of training, see :class:`.RunFlags`."""
    return {
        "distributed_timeout_minutes": dist.default_pg_timeout.total_seconds() / 60,
        "exit_interval": None,
        "high_priority_stream_groups": None,
        "iteration": 0,
        "log_interval": _ENDLESS,
        "nccl_communicator_config_path": None,
        "profile": False,
        "train_iters": _ENDLESS,
    }
