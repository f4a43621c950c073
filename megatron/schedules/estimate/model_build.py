"""Models as Megatron's arguments build and train them: bytes of each parameter, recompute, and costs for plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.schedules.estimate.build import Build, Quantized, Shape
from megatron.schedules.estimate.device_memory import Numbers, RankMemory, Recompute, memory, model_memory
from megatron.schedules.estimate.parallel_sizes import sizes_of
from megatron.schedules.estimate.parameters import parameters
from megatron.schedules.estimate.times import ANY, Prices, loads, message_shares
from megatron.schedules.estimate.work import Work, layer_work
from megatron.schedules.measure.cost_profile import Profile
from megatron.schedules.planner.request import Request
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.stage_costs import StageCosts

_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0}
# Most plans hold no more messages on a rank at once; the number is known once a plan is lowered.
MESSAGES = 8
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
    one_kernel = args.transformer_impl != "local" and getattr(backend, "name", "auto") != "unfused"
    number = number_bytes(args)
    return Build(
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
        shared_gate=args.moe_shared_expert_gate,
        positions=(args.max_position_embeddings or 0) if learned and args.add_position_embedding else 0,
        rotary=args.position_embedding_type in ("rope", "yarn", "mrope") or args.use_rotary_position_embeddings,
        fused_rotary=args.apply_rope_fusion,
        given_mask=args.create_attention_mask_in_dataloader,
        fused_activation=args.bias_swiglu_fusion if args.swiglu else True,
        fused_gradients=args.gradient_accumulation_fusion,
        fused_loss=args.cross_entropy_loss_fusion and args.cross_entropy_fusion_impl == "te",
        contiguous=args.transformer_impl != "local",
        plain=args.distributed_backend == "gloo" and args.transformer_impl == "local",
        samples=args.micro_batch_size or 1,
        context=args.context_parallel_size,
        number=number,
        residual=4 if args.fp32_residual_connection else number,
        quantized=_quantized(args),
    )


def _quantized(args: Any) -> Quantized | None:
    """Reads Megatron's FP8 and FP4 flags. Local linears do not know them."""
    if not (args.fp8 or args.fp4) or args.transformer_impl == "local":
        return None
    recipe = str(args.fp8_recipe) if args.fp8 else "nvfp4"
    ends = (args.num_layers_at_start_in_bf16, args.num_layers_at_end_in_bf16)
    return Quantized(
        recipe,
        ends if args.first_last_layers_bf16 else (0, 0),
        output=bool(args.fp8_output_proj) and recipe == "mxfp8",
        primary=bool(args.fp8_param_gather if args.fp8 else args.fp4_param_gather),
    )


@dataclass(frozen=True)
class StockRecompute:
    """Megatron's own recompute, as its four flags."""

    granularity: str | None = None
    method: str | None = None
    layers: int | None = None
    modules: tuple[str, ...] = ()

    @property
    def kept(self) -> Recompute:
        """The same for memory estimates."""
        if self.granularity == "full":
            each = self.layers or 1
            return Recompute(layers=None, together=each) if self.method == "uniform" else Recompute(layers=each)
        return Recompute(modules=self.modules or ("core_attn",)) if self.granularity == "selective" else Recompute()


@dataclass(frozen=True)
class TrainedModel:
    """A model as a job trains it.

    Args:
        build: how Megatron builds it.
        numbers: bytes of each parameter.
        recompute: Megatron's own recompute.
        stand_in: true if the embedding and the output layer count as a layer each in an even partition.
    """

    build: Build
    numbers: Numbers
    recompute: Recompute
    stand_in: tuple[bool, bool] = (False, False)

    @property
    def message_bytes(self) -> float:
        """Bytes of one microbatch's hidden states on one rank."""
        build = self.build
        return build.tokens * build.shape.hidden * build.number / (build.tensor if build.sequence_parallel else 1)


def trained_model(args: Any, build: Build) -> TrainedModel:
    """Returns ``build`` as trained with Megatron's ``args``, which need not be validated."""
    stand_in = bool(args.account_for_embedding_in_pipeline_split), bool(args.account_for_loss_in_pipeline_split)
    each = replace(numbers(args), shared_by=sizes_of(args, args.world_size).optimizer_shared_by)
    return TrainedModel(build, each, stock_recompute(args).kept, stand_in)


def with_model(
    costs: Costs,
    model: TrainedModel,
    stages: float,
    *,
    shared: bool,
    placed: bool = False,
    profile: Profile | None = None,
    hides: bool = False,
    prices: Prices = ANY,
) -> Costs:
    """Adds time and memory of each part of ``model``, with Megatron's recompute, to ``costs``.

    Args:
        costs: times; a ``model`` in them is kept.
        model: the model as trained.
        stages: stages of the plan, or the most of them if that number is searched.
        shared: true under vocabulary parallelism.
        placed: true if the planner partitions the layers and reserves memory for their parameters.
        profile: measured profile of the model, if there is one.
        hides: true if weight gradients may run behind messages of experts. Their time is computed from the model's
            arithmetic if neither ``costs`` nor a profile has it.
        prices: prices of the device for that.
    """
    build = model.build
    numbers = model.numbers if placed else None
    kept = model_memory(build, build.tokens, model.recompute, shared=shared, numbers=numbers)
    kept = kept if profile is None else profile.memory(kept)
    work = layer_work(build, experts=any(build.where))
    speed = build.quantized.speed if build.quantized else 1.0
    repeated = recomputed_share(model.recompute, work, build.shape.layers / stages, speed)
    messages = costs.messages
    if hides and profile is None and not any(messages):
        forward, input_grad = message_shares(build, prices, build.tokens)
        messages = forward * costs.forward, input_grad * costs.input_grad
    return replace(
        costs,
        messages=messages,
        model=replace(costs.model or loads(build), stand_in=model.stand_in),
        # Measured times include it if it was on.
        stock_recompute=repeated if profile is None or profile.facts.recompute is None else costs.stock_recompute,
        shared_vocabulary=shared,
        memory=kept,
        weight_share=kept.weight_share,
    )


def rank_memory(
    model: TrainedModel,
    schedule: Schedule,
    on_stages: StageCosts,
    request: Request,
    messages: Sequence[float] | None = None,
) -> tuple[RankMemory, ...]:
    """Memory of each rank of ``schedule``.

    Args:
        model: the model as trained.
        schedule, on_stages: the plan and its costs.
        request: request of the plan; its costs include the model's memory.
        messages: peak number of messages on each rank; defaults to :data:`MESSAGES`.
    """
    costs, placement = request.costs, schedule.placement
    counts = request.layers_on(placement)
    assert costs.memory is not None and counts is not None, "the model is known"
    sizes = parameters(model.build).by_stage(counts, placement.rank_of, costs.shared_vocabulary)
    waiting = [model.message_bytes * count for count in messages or [MESSAGES] * schedule.ranks]
    return memory(schedule, on_stages, costs.memory, counts, sizes, model.numbers, waiting)


def recomputed_share(recompute: Recompute, work: Work, layers_a_stage: float, speed: float = 1.0) -> float:
    """Share of the forward that I recomputes. Times given with ``--pipeline-costs`` do not include it.

    Args:
        recompute: Megatron's own recompute.
        work: work of a decoder layer.
        layers_a_stage: decoder layers of a stage.
        speed: speed of linears relative to attention's, in FLOPs.
    """
    if recompute.layers != 0:
        return 1.0 if recompute.layers is None else min(1.0, recompute.layers / max(layers_a_stage, 1.0))
    return sum(work.share(module, speed) for module in recompute.modules)


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
