"""What cannot work together with a schedule, and what to use instead: one rule each."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.integration.flags.vocabulary import indivisible
from megatron.schedules.integration.layers.by_stage import wrong_layers
from megatron.schedules.integration.linears.te_version import te_fault
from megatron.schedules.job.spec import JobSpec
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.schedule import Schedule


def refusal(spec: JobSpec, schedule: Schedule) -> str:
    """Why Megatron's flags do not go with ``schedule``, after its name; empty where they do."""
    facts = _Facts(spec, schedule)
    return next((rule.why(facts) for rule in _RULES if rule.applies(facts)), "")


def _is_set(spec: JobSpec, name: str) -> bool:
    value = spec.stock.get(name)
    return value not in (None, False, 0, "none", "local" if name == "transformer_impl" else None, [])


class _Facts(NamedTuple):
    spec: JobSpec
    schedule: Schedule

    def on(self, name: str) -> bool:
        """Whether stock's argument ``name`` is set to anything; false where this version has no such argument."""
        return _is_set(self.spec, name)

    @property
    def splits(self) -> bool:
        return self.schedule.splits

    @property
    def recomputes(self) -> bool:
        return Kind.R in self.schedule.kinds

    @property
    def shares(self) -> bool:
        return self.spec.settings.vocabulary_parallel

    @property
    def fp8_recipe(self) -> str:
        """How linears are quantized to FP8; empty where they are not."""
        return str(self.spec.stock.get("fp8_recipe") or "delayed") if self.on("fp8") else ""

    @property
    def chunks(self) -> int:
        return self.schedule.placement.chunks

    @property
    def wrong_layers(self) -> str:
        layers = self.spec.settings.layers
        return "" if layers == "auto" else wrong_layers(self.spec.layers, self.schedule.placement.stages, layers)

    @property
    def unsplittable(self) -> str:
        return unsplittable(self.spec) if self.splits else ""


class _Rule(NamedTuple):
    applies: Callable[[_Facts], bool]
    why: Callable[[_Facts], str]


def _flag(
    name: str, why: str, only: Callable[[_Facts], bool] = lambda facts: True, written: str | None = None
) -> _Rule:
    """A rule against a stock argument being set; ``written`` where its flag is not named after it."""
    written = written or "--" + name.replace("_", "-")
    return _Rule(lambda facts: facts.on(name) and only(facts), lambda facts: f"does not work with {written}: {why}")


def _several(facts: _Facts) -> bool:
    return facts.chunks > 1


def _ends_elsewhere(facts: _Facts) -> bool:
    placement = facts.schedule.placement
    return placement.rank_of[0] != 0 or placement.rank_of[-1] not in (0, placement.ranks - 1)


def _out_of_order(facts: _Facts) -> bool:
    """Whether the backwards of a stage come in another order than its forwards."""
    orders: dict[tuple[int, bool], list[int]] = {}
    for row in facts.schedule.order:
        for each in row:
            if each.kind in (Kind.F, Kind.I, Kind.B):
                orders.setdefault((each.stage, each.kind is Kind.F), []).append(each.microbatch)
    return any(orders[stage, True] != orders.get((stage, False)) for stage, forward in orders if forward)


def _shares(facts: _Facts) -> bool:
    return facts.shares


def _shared(name: str, why: str, written: str | None = None) -> _Rule:
    """A rule against a stock argument beside a shared vocabulary."""
    rule = _flag(name, why, _shares, written)
    return _Rule(rule.applies, lambda facts: f"with {FLAGS['shared_vocabulary']} {rule.why(facts)}")


FP8_RECIPES = ("tensorwise", "delayed", "blockwise", "mxfp8")
_STOCK_CHUNKS = "the schedule sets the number of chunks itself; leave the flag out"


def unsplittable(spec: JobSpec) -> str:
    """What is wrong with the linears asked for where the schedule splits their backward; empty where they split."""
    if not _is_set(spec, "transformer_impl"):
        return ""
    used = spec.stock["transformer_impl"]
    if used == "transformer_engine":
        fault = te_fault() if spec.settings.dry_run is None else None
    else:
        fault = "of Megatron's linears only the local ones and Transformer Engine's can be split"
    if fault is None:
        return ""
    return (
        f"does not work with --transformer-impl {used} here: {fault}; use --transformer-impl local, "
        "or 1f1b, interleaved-1f1b or 1f1b-v, which do not split the backward"
    )


def _splits_te(facts: _Facts) -> bool:
    return facts.splits and facts.on("transformer_impl")


def _again(name: str, why: str, written: str | None = None) -> _Rule:
    """A rule against a stock argument beside forwards that the schedule does again."""
    rule = _flag(name, why, lambda facts: facts.recomputes, written)
    return _Rule(rule.applies, lambda facts: f"with forwards done again (R) {rule.why(facts)}")


_NOT_TWICE = "quantised layers are not done again by a schedule so far; use bf16, or a schedule without R"
_QUANTISED = (
    "quantised linears are not split so far; use bf16, or 1f1b, interleaved-1f1b or 1f1b-v, which do not split the "
    "backward"
)
_OLD_FORMAT = (
    "it keeps layers by their number on the rank, and a job with another schedule would take them for others; leave "
    "the flag out, and checkpoints go from any schedule to any other"
)
_ONE_SHAPE = "ranks meet over microbatches of one shape; leave one of the two out"
_RULES = (
    _Rule(
        lambda facts: (
            (facts.chunks > 1 or facts.spec.layers.by_hand or facts.spec.settings.layers != "even")
            and bool(facts.wrong_layers)
        ),
        lambda facts: facts.wrong_layers,
    ),
    _Rule(
        _ends_elsewhere,
        lambda f: (
            "puts the embedding or the output layer in the middle of the ranks: stage 0 must be on rank 0 and "
            "the last stage on the first or the last rank"
        ),
    ),
    _flag("num_layers_per_virtual_pipeline_stage", _STOCK_CHUNKS),
    _flag("num_virtual_stages_per_pipeline_rank", _STOCK_CHUNKS),
    _Rule(lambda facts: bool(facts.unsplittable), lambda facts: facts.unsplittable),
    _flag(
        "tp_comm_overlap",
        "its buffers are used again before the weight gradients are computed; leave the flag out",
        _splits_te,
    ),
    _flag("use_transformer_engine_op_fuser", "fused linears are not split; leave the flag out", _splits_te),
    _flag(
        "overlap_dispatch_backward_with_experts_wgrad",
        "the schedule places weight gradients itself; leave the flag out",
        _splits_te,
    ),
    _Rule(
        lambda facts: _splits_te(facts) and facts.fp8_recipe not in ("", *FP8_RECIPES),
        lambda facts: f"does not work with --fp8-recipe {facts.fp8_recipe}: use one of {', '.join(FP8_RECIPES)}",
    ),
    _flag("fp8_param_gather", "primary FP8 weights are not split so far; leave the flag out", _splits_te),
    _Rule(
        lambda facts: facts.fp8_recipe == "delayed" and bool(facts.spec.recompute.granularity) and _out_of_order(facts),
        lambda facts: (
            "does not work with --fp8-recipe delayed and --recompute-granularity: Transformer Engine keeps scales in "
            "the order of forwards, which this schedule's backwards do not have; use another recipe, or no recompute"
        ),
    ),
    _flag("fp4", _QUANTISED, _splits_te, "--fp4-format"),
    _flag("te_precision_config_file", _QUANTISED, _splits_te),
    _flag("kitchen_config_file", _QUANTISED, _splits_te),
    _flag("kitchen_recipe_number", _QUANTISED, _splits_te),
    _Rule(
        lambda facts: facts.recomputes and facts.fp8_recipe == "delayed",
        lambda facts: (
            "with forwards done again (R) does not work with --fp8-recipe delayed: scales change between F and R; use "
            "tensorwise, blockwise or mxfp8, or a schedule without R"
        ),
    ),
    _again("fp4", _NOT_TWICE, "--fp4-format"),
    _again("te_precision_config_file", _NOT_TWICE),
    _again("kitchen_config_file", _NOT_TWICE),
    _again("kitchen_recipe_number", _NOT_TWICE),
    _again("te_rng_tracker", "its random states cannot be brought back one by one; leave the flag out"),
    _Rule(
        lambda facts: facts.recomputes and facts.spec.recompute.granularity == "full",
        lambda facts: (
            "with forwards done again (R) does not work with --recompute-granularity full: both do whole layers again; "
            "leave the flag out, or give selective"
        ),
    ),
    _flag("cuda_graph_impl", "CUDA graphs are not supported; leave the flag out"),
    _flag("enable_cuda_graph", "CUDA graphs are not supported; leave the flag out"),
    _flag("external_cuda_graph", "CUDA graphs are not supported; leave the flag out"),
    _flag("overlap_moe_expert_parallel_comm", "it brings a schedule of its own; leave the flag out"),
    _flag("delay_wgrad_compute", "the schedule places weight gradients itself; leave the flag out"),
    _flag("defer_embedding_wgrad_compute", "the schedule places weight gradients itself; leave the flag out"),
    _flag("moe_paged_stash", "it wraps the schedule; leave the flag out"),
    _flag("moe_expert_rank_capacity_factor", "it wraps the schedule; leave the flag out"),
    _flag(
        "fine_grained_activation_offloading",
        "it counts on Megatron's own schedule; use --pipeline-save-memory offload instead",
    ),
    _flag("use_torch_fsdp2", "use Megatron's own data parallelism or distributed optimizer"),
    _flag("use_megatron_fsdp", "use Megatron's own data parallelism or distributed optimizer"),
    _flag(
        "step_batch_size_schedule",
        "a CSV is for one number of microbatches",
        lambda f: f.spec.settings.schedule.name == "file",
    ),
    _Rule(
        lambda f: f.spec.stock.get("ckpt_format") == "torch" and not f.schedule.placement.looped,
        lambda f: f"does not work with --ckpt-format torch: {_OLD_FORMAT}",
    ),
    _Rule(
        lambda facts: facts.shares and facts.spec.stock.get("ckpt_format") == "torch",
        lambda facts: (
            f"with {FLAGS['shared_vocabulary']} does not work with --ckpt-format torch: it does not say which words a "
            "rank holds; leave the flag out"
        ),
    ),
    _Rule(
        lambda facts: facts.shares and bool(indivisible(facts.spec)),
        lambda facts: f"with {FLAGS['shared_vocabulary']} {indivisible(facts.spec)}",
    ),
    _shared("hybrid_layer_pattern", "hybrid models have other ends; leave one of the two out"),
    _shared("sft", _ONE_SHAPE),
    _shared("variable_seq_lengths", _ONE_SHAPE, "args.variable_seq_lengths"),
    _shared("dataloader_inter_document_masking", _ONE_SHAPE),
    _shared("fp8_output_proj", "its part of the output layer is not quantised; leave one of the two out"),
    _shared("use_mup", "its logits are scaled; leave one of the two out"),
    _shared("init_model_with_meta_device", "the first weights are dealt out to the ranks; leave one of the two out"),
    _flag("hybrid_layer_pattern", "hybrid models are not supported yet", _several),
    _flag(
        "num_microbatches_with_partial_activation_checkpoints",
        "it counts on Megatron's own schedule; leave the flag out",
    ),
)
