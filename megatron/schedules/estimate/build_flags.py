"""Reads from Megatron's arguments how a model is built and trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron.schedules.estimate.build import Build, Quantized
from megatron.schedules.estimate.device_memory import Numbers
from megatron.schedules.estimate.layer_pattern import hybrid_pattern
from megatron.schedules.estimate.model_build import StockRecompute
from megatron.schedules.estimate.parallel_sizes import sizes_of
from megatron.schedules.estimate.shape import Shape
from megatron.schedules.estimate.symbols import with_adapters

GRAPHS = "transformer_engine"
"""Value of ``--cuda-graph-impl`` for the CUDA graphs that a schedule can place."""

WHOLE = "full_iteration"
"""Value of ``--cuda-graph-impl`` for one CUDA graph of a whole iteration."""

STREAMS = {"enable_mhc_connections": "mhc_num_residual_streams", "enable_hyper_connections": "num_residual_streams"}
"""Hyper-connections and their number of residual streams, in Megatron-LM's branches main and dev; in no release yet."""

_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0}
# Single-precision tensors of the parameter's size that each optimizer keeps; others as many as Adam.
_MOMENTS = {"adam": 2, "lion": 1, "muon": 1, "dist_muon": 1, "adaptive_muon": 2, "soap": 4}


def as_built(args: Any, shape: Shape) -> Build:
    """Returns how Megatron builds ``shape``.

    Args:
        args: Megatron's arguments, parsed but not validated.
        shape: sizes with the padded vocabulary.
    """
    head = args.kv_channels or args.hidden_size // args.num_attention_heads
    learned = args.position_embedding_type == "learned_absolute" and not args.use_rotary_position_embeddings
    # Megatron's parser makes it an enum member. Ours, used before Megatron is imported, does not read it.
    backend = getattr(args, "attention_backend", None)
    engine = of_engine(args)
    one_kernel = engine and getattr(backend, "name", "auto") != "unfused"
    number = number_bytes(args)
    build = Build(
        replace(shape, fused=one_kernel),
        head,
        tensor=args.tensor_model_parallel_size,
        sequence_parallel=bool(args.sequence_parallel) and args.tensor_model_parallel_size > 1,
        expert_tensor=sizes_of(args).expert_tensor,
        experts=args.num_experts or 0,
        biases=args.add_bias_linear,
        attention_biases=args.add_qkv_bias,
        two_norms=args.normalization == "LayerNorm",
        head_norms=args.qk_layernorm,
        output_gates=args.attention_output_gate,
        shared_gate=args.moe_shared_expert_gate,
        positions=(args.max_position_embeddings or 0) if learned and args.add_position_embedding else 0,
        rotary=args.position_embedding_type in ("rope", "yarn", "mrope") or args.use_rotary_position_embeddings,
        fused_rotary=args.apply_rope_fusion,
        given_mask=args.create_attention_mask_in_dataloader,
        fused_activation=args.bias_swiglu_fusion if args.swiglu else True,
        fused_gradients=args.gradient_accumulation_fusion,
        fused_loss=args.cross_entropy_loss_fusion and args.cross_entropy_fusion_impl == "te",
        joined_loss=args.cross_entropy_loss_fusion,
        contiguous=engine,
        samples=args.micro_batch_size or 1,
        context=args.context_parallel_size,
        number=number,
        residual=4 if args.fp32_residual_connection else number,
        quantized=_quantized(args),
        graphs=_graphs(args),
        captured=graphs_impl(args) == WHOLE,
        fused_experts=bool(getattr(args, "use_transformer_engine_op_fuser", False)) and bool(args.num_experts),
        fused_dispatch=_dispatcher(args) == "flex" and getattr(args, "moe_flex_dispatcher_backend", "") == "hybridep",
        streams=residual_streams(args),
    )
    return with_adapters(build, getattr(args, "adapters", None))


def residual_streams(config: Any) -> int:
    """Reads the number of residual streams from arguments or a configuration: 1, or several with hyper-connections.

    The first stage makes them of its embedding, and the last merges them before its final norm.
    """
    return next((int(getattr(config, number)) for on, number in STREAMS.items() if getattr(config, on, False)), 1)


def graphs_impl(args: Any) -> str:
    """Returns what captures CUDA graphs, as ``--cuda-graph-impl`` names it; empty without them.

    Older flags are read too.
    """
    if (named := getattr(args, "cuda_graph_impl", None) or "none") != "none":
        return WHOLE if named == "local" and WHOLE in _scopes(args) else str(named)
    return GRAPHS if getattr(args, "external_cuda_graph", False) else ""


def _graphs(args: Any) -> frozenset[str] | None:
    """Reads which parts of layers Transformer Engine captures; ``moe_preprocess`` only if it permutes tokens."""
    if graphs_impl(args) != GRAPHS or not hasattr(args, "cuda_graph_modules"):
        return None
    modules = args.cuda_graph_modules
    listed = modules.split(",") if isinstance(modules, str) else modules or ()
    parts = frozenset(str(getattr(module, "name", module)) for module in listed) - {"full"}
    permutes = _dispatcher(args) == "alltoall" and args.expert_model_parallel_size > 1
    return parts if permutes else parts - {"moe_preprocess"}


def _dispatcher(args: Any) -> str:
    return str(getattr(args, "moe_token_dispatcher_type", ""))


def _scopes(args: Any) -> Iterator[str]:
    """Yields what graphs have, as older flags name it."""
    for name in ("cuda_graph_scope", "cuda_graph_scope_deprecated", "cuda_graph_modules"):
        scope = getattr(args, name, None) or ()
        yield from [scope] if isinstance(scope, str) else (str(getattr(each, "name", each)) for each in scope)


def of_engine(args: Any) -> bool:
    """Returns whether layers are Transformer Engine's, as all of a hybrid model are."""
    return args.transformer_impl != "local" or hybrid_pattern(args) is not None


def _quantized(args: Any) -> Quantized | None:
    """Reads Megatron's FP8 and FP4 flags. Local linears do not know them."""
    if not (args.fp8 or args.fp4) or not of_engine(args):
        return None
    recipe = str(args.fp8_recipe) if args.fp8 else "nvfp4"
    ends = (args.num_layers_at_start_in_bf16, args.num_layers_at_end_in_bf16)
    return Quantized(
        recipe,
        ends if args.first_last_layers_bf16 else (0, 0),
        output=bool(args.fp8_output_proj) and recipe == "mxfp8",
        primary=bool(args.fp8_param_gather if args.fp8 else args.fp4_param_gather),
    )


def stand_in(args: Any) -> tuple[bool, bool]:
    """Reads whether the embedding and the output layer count as a layer each in an even partition."""
    return bool(args.account_for_embedding_in_pipeline_split), bool(args.account_for_loss_in_pipeline_split)


def stock_recompute(args: Any) -> StockRecompute:
    """Reads Megatron's recompute flags."""
    modules = tuple(args.recompute_modules or ())
    return StockRecompute(args.recompute_granularity, args.recompute_method, args.recompute_num_layers, modules)


def number_bytes(args: Any) -> int:
    """Bytes of a number in the model's precision."""
    return 2 if args.bf16 or args.fp16 else 4


def numbers(args: Any) -> Numbers:
    """Bytes of each parameter, without a distributed optimizer."""
    weight, quantized = float(number_bytes(args)), _quantized(args)
    copies = 0.0 if quantized is None else quantized.weight
    return Numbers(weight, _gradient(args), _state(args, weight == 2), on_host=_on_host(args), copies=copies)


def _gradient(args: Any) -> float:
    """Bytes of a gradient: single precision for bf16 and half precision for fp16, unless a flag changes it."""
    half = bool(args.fp16) or (bool(args.bf16) and (args.grad_reduce_in_bf16 or args.main_grads_dtype == "bf16"))
    return 2.0 if half and not args.accumulate_allreduce_grads_in_fp32 else 4.0


def _state(args: Any, half: bool) -> float:
    """Bytes of the optimizer state: a master copy of half-precision parameters, and moments."""
    if args.optimizer == "sgd":
        return (4.0 if half else 0.0) + (4.0 if args.sgd_momentum else 0.0)
    if args.use_precision_aware_optimizer:
        # Only the lower half of the single-precision copy is kept.
        copy = 2.0 if half else 0.0
        return copy + _BYTES[args.exp_avg_dtype] + _BYTES[args.exp_avg_sq_dtype]
    return (4.0 if half else 0.0) + 4.0 * _MOMENTS.get(args.optimizer, 2)


def _on_host(args: Any) -> float:
    return float(args.optimizer_offload_fraction) if args.optimizer_cpu_offload else 0.0
