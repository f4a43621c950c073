"""How Megatron builds the model of its arguments, and what a parameter takes: for estimates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.schedules.estimate.build import Build
from megatron.schedules.estimate.device_memory import Numbers
from megatron.schedules.estimate.shape import Shape

_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0}
# Tensors of the parameter's size in single precision that each keeps; of others as many as Adam.
_MOMENTS = {"adam": 2, "lion": 1, "muon": 1, "dist_muon": 1, "adaptive_muon": 2, "soap": 4}


def as_built(args: Any, shape: Shape) -> Build:
    """The build of ``shape``.

    Args:
        args: Megatron's, parsed but not validated.
        shape: with the vocabulary as padded.
    """
    head = args.kv_channels or args.hidden_size // args.num_attention_heads
    learned = args.position_embedding_type == "learned_absolute" and not args.use_rotary_position_embeddings
    # Megatron's parser makes an enum's member of it; ours, before Megatron is imported, does not read it.
    backend = getattr(args, "attention_backend", None)
    one_kernel = args.transformer_impl != "local" and getattr(backend, "name", "auto") != "unfused"
    number = number_bytes(args)
    return Build(
        replace(shape, fused=one_kernel),
        head,
        tensor=args.tensor_model_parallel_size,
        sequence_parallel=bool(args.sequence_parallel) and args.tensor_model_parallel_size > 1,
        expert_tensor=expert_tensor(args),
        experts=args.num_experts or 0,
        biases=args.add_bias_linear,
        attention_biases=args.add_qkv_bias,
        two_norms=args.normalization == "LayerNorm",
        head_norms=args.qk_layernorm,
        shared_gate=args.moe_shared_expert_gate,
        positions=(args.max_position_embeddings or 0) if learned and args.add_position_embedding else 0,
        rotary=args.position_embedding_type in ("rope", "yarn", "mrope") or args.use_rotary_position_embeddings,
        fused_rotary=args.apply_rope_fusion,
        given_mask=args.create_attention_mask_in_dataloader,
        fused_activation=args.bias_swiglu_fusion if args.swiglu else True,
        fused_loss=args.cross_entropy_loss_fusion and args.cross_entropy_fusion_impl == "te",
        plain=args.distributed_backend == "gloo",
        samples=args.micro_batch_size,
        number=number,
        residual=4 if args.fp32_residual_connection else number,
    )


def number_bytes(args: Any) -> int:
    """Of a number that is at half precision where any is."""
    return 2 if args.bf16 or args.fp16 else 4


def expert_tensor(args: Any) -> int:
    """Tensor-parallel ranks of an expert."""
    return int(args.expert_tensor_parallel_size or args.tensor_model_parallel_size)


def numbers(args: Any) -> Numbers:
    """Bytes that each parameter takes, of an optimizer that is not shared."""
    weight = float(number_bytes(args))
    return Numbers(weight, _gradient(args), _state(args, weight == 2), on_host=_on_host(args))


def _gradient(args: Any) -> float:
    """In single precision for bf16, unless a flag says otherwise; at half precision for fp16, unless one does."""
    half = bool(args.fp16) or (bool(args.bf16) and (args.grad_reduce_in_bf16 or args.main_grads_dtype == "bf16"))
    return 2.0 if half and not args.accumulate_allreduce_grads_in_fp32 else 4.0


def _state(args: Any, half: bool) -> float:
    """A copy of the parameter where that is at half precision, and moments."""
    if args.optimizer == "sgd":
        return (4.0 if half else 0.0) + (4.0 if args.sgd_momentum else 0.0)
    if args.use_precision_aware_optimizer:
        # Of a copy in single precision what bf16 lacks, its lower half, is all that is kept.
        copy = 2.0 if half else 0.0
        return copy + _BYTES[args.exp_avg_dtype] + _BYTES[args.exp_avg_sq_dtype]
    return (4.0 if half else 0.0) + 4.0 * _MOMENTS.get(args.optimizer, 2)


def _on_host(args: Any) -> float:
    return float(args.optimizer_offload_fraction) if args.optimizer_cpu_offload else 0.0
