"""Rules for flags that cannot be combined with a schedule, each with an alternative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron.schedules.estimate.build_flags import GRAPHS, WHOLE
from megatron.schedules.job.machine import ANY, Machine
from megatron.schedules.job.spec import JobSpec
from megatron.schedules.job.stage_layers import letters_by_stage, wrong_layers
from megatron.schedules.planner.registry import AUTO
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.schedule.schedule import Schedule


def refusal(spec: JobSpec, schedule: Schedule, machine: Machine = ANY) -> str:
    """Reason why Megatron's flags do not work with ``schedule``, to print after its name; empty if they work.

    Args:
        spec: the job.
        schedule: its plan.
        machine: what it runs on.
    """
    job = _Job(spec, schedule, machine)
    return next(filter(None, (rule(job) for rule in _RULES)), "")


def unlogged(spec: JobSpec, placement: Placement, layers: Sequence[int]) -> str:
    """Reason why an older Megatron cannot log the auxiliary losses of a hybrid model's experts; empty if it can.

    Args:
        spec: the job.
        placement: rank of each stage.
        layers: layers of each stage.
    """
    pattern, given = spec.layers.pattern, spec.stock.given
    if pattern is None or not given & {"moe_aux_loss_coeff", "moe_z_loss_coeff"}:
        return ""
    letters = letters_by_stage(pattern, layers)
    having = [any("E" in letters[stage] for stage in placement.stages_of(rank)) for rank in range(placement.ranks)]
    if all(having) or not any(having):
        return ""
    return (
        f"puts no layer with experts (E) on rank {having.index(False)}, and this Megatron logs auxiliary losses only "
        "if all ranks have experts: give each rank some with | in --hybrid-layer-pattern, or leave out "
        "--moe-aux-loss-coeff and --moe-z-loss-coeff"
    )


def unsplittable(spec: JobSpec, machine: Machine = ANY) -> str:
    """Reason why a schedule cannot split the backward of the job's linears; empty if it can."""
    used, fault = spec.stock.transformer_impl, machine.engine_fault
    if used == "local":
        return ""
    if used != "transformer_engine":
        fault = "of Megatron's linears only the local ones and Transformer Engine's can be split"
    if not fault:
        return ""
    whole = ", or 1f1b, interleaved-1f1b or 1f1b-v, which do not split the backward" if machine.has_engine else ""
    return f"does not work with --transformer-impl {used} here: {fault}; use --transformer-impl local{whole}"


class _Job(NamedTuple):
    spec: JobSpec
    schedule: Schedule
    machine: Machine


_Rule = Callable[[_Job], str]
"""Says what is wrong with a job; empty where nothing is."""


class _When(NamedTuple):
    """Condition of a rule.

    Args:
        holds: returns whether the condition is true.
        words: the condition in a refusal's text, with the parts of a request in braces for their flags.
    """

    holds: Callable[[_Job], bool]
    words: str = ""


_ALWAYS = _When(lambda job: True)
_CSV = _When(lambda job: job.spec.settings.schedule.name == "file")
_OLD_FORMAT = _When(lambda job: job.spec.stock.checkpoint_format == "torch" and not job.schedule.placement.looped)
_MOVED = _When(lambda job: not job.schedule.placement.looped or job.spec.settings.vocabulary_parallel)
_SPLIT = _When(lambda job: job.schedule.splits)
# ``auto`` splits nothing where that is shortest.
_WHOLE = _When(lambda job: not job.schedule.splits and job.spec.settings.schedule.name != AUTO)
_SPLIT_TE = _When(lambda job: job.schedule.splits and job.spec.stock.transformer_impl != "local")
_FUSED_EXPERTS = _When(
    lambda job: _SPLIT_TE.holds(job) and "use_transformer_engine_op_fuser" in job.spec.stock.given,
    "with --use-transformer-engine-op-fuser ",
)
_SPLIT_DENSE_TE = _When(lambda job: _SPLIT_TE.holds(job) and "num_experts" not in job.spec.stock.given)
_HIDES = _When(
    lambda job: "overlap_moe_expert_parallel_comm" in job.spec.stock.given, "with --overlap-moe-expert-parallel-comm "
)
_NO_MESSAGES = _When(lambda job: job.spec.sizes.expert == 1, "with --expert-model-parallel-size 1 ")
_RECOMPUTE = _When(lambda job: Kind.R in job.schedule.kinds, "with recompute passes (R) ")
_TWICE = _When(lambda job: _RECOMPUTE.holds(job) and job.spec.recompute.granularity == "full", _RECOMPUTE.words)
_DELAYED_RECOMPUTE = _When(
    lambda job: _RECOMPUTE.holds(job) and job.spec.stock.fp8_recipe == "delayed", _RECOMPUTE.words
)
_VOCABULARY = _When(lambda job: job.spec.settings.vocabulary_parallel, "with {shared_vocabulary} ")
_WORDS_IN_OLD_FORMAT = _When(
    lambda job: _VOCABULARY.holds(job) and job.spec.stock.checkpoint_format == "torch", _VOCABULARY.words
)


def _flag(name: str, why: str, when: _When = _ALWAYS, written: str = "") -> _Rule:
    """Returns a rule that refuses Megatron's argument ``name``.

    Args:
        name: name of the argument.
        why: the reason, and what to do.
        when: condition of the rule.
        written: the flag, if its name differs from the argument's.
    """
    written = written or "--" + name.replace("_", "-")

    def rule(job: _Job) -> str:
        wrong = name in job.spec.stock.given and when.holds(job)
        return f"{when.words.format_map(job.spec.flags)}does not work with {written}: {why}" if wrong else ""

    return rule


def _layers(job: _Job) -> str:
    """Refuses layers that do not divide over the stages, and names numbers that do."""
    stock, layers, placement = job.spec.layers, job.spec.settings.layers, job.schedule.placement
    if layers == "auto" or (stock.count is None and placement.chunks == 1):
        return ""
    wrong = wrong_layers(stock, placement.stages, layers)
    partitioned = not job.spec.settings.places_layers and not (stock.by_hand or any(stock.stand_in))
    can_be = wrong and partitioned and (stock.count or 0) >= placement.stages
    by_hand = "write | between the stages, or " if stock.pattern is not None else ""
    auto = f"{wrong}; or {by_hand}give {job.spec.flags['layers']} auto, which divides any number of layers"
    return auto if can_be else wrong


def _ends(job: _Job) -> str:
    placement = job.schedule.placement
    if placement.rank_of[0] == 0 and placement.rank_of[-1] in (0, placement.ranks - 1):
        return ""
    return (
        "puts the embedding or the output layer in the middle of the ranks: stage 0 must be on rank 0 and "
        "the last stage on the first or the last rank"
    )


def _linears(job: _Job) -> str:
    return unsplittable(job.spec, job.machine) if _SPLIT.holds(job) else ""


def _graphs(job: _Job) -> str:
    """Refuses CUDA graphs without weight gradients, or that cannot be captured here or have not all passes."""
    impl, fault = job.spec.stock.cuda_graphs, job.machine.graphs_fault
    if job.spec.stock.given.isdisjoint(("cuda_graph_impl", "external_cuda_graph")):
        return ""
    if impl not in (GRAPHS, WHOLE):
        why = _OTHER_GRAPHS.get(impl, "it is unknown")
        return f"does not work with --cuda-graph-impl {impl}: {why}; use {GRAPHS} or {WHOLE}, or leave the flag out"
    fault = fault or ("the schedule recomputes or offloads" if job.schedule.kinds & {Kind.R, Kind.O} else "")
    return f"does not work with --cuda-graph-impl {impl} here: {fault}; leave the flag out" if fault else ""


def _fp8_recipe(job: _Job) -> str:
    """Refuses an FP8 recipe whose linears cannot be split."""
    recipe = job.spec.stock.fp8_recipe
    if not _SPLIT_TE.holds(job) or recipe in ("", *_FP8_RECIPES):
        return ""
    return f"does not work with --fp8-recipe {recipe}: use one of {', '.join(_FP8_RECIPES)}"


def _fp8_order(job: _Job) -> str:
    """Refuses an order in which Megatron's own recompute does not find the FP8 scales of its forward."""
    if job.spec.stock.fp8_recipe != "delayed" or not job.spec.recompute.granularity or not _out_of_order(job.schedule):
        return ""
    return (
        "does not work with --fp8-recipe delayed and --recompute-granularity: Transformer Engine keeps scales in "
        "the order of forwards, which this schedule's backwards do not have; use another recipe, or no recompute"
    )


def _out_of_order(schedule: Schedule) -> bool:
    """Returns whether the backwards of a stage come in another order than its forwards."""
    orders: dict[tuple[int, bool], list[int]] = {}
    for row in schedule.order:
        for work in row:
            if work.kind in (Kind.F, Kind.I, Kind.B):
                orders.setdefault((work.stage, work.kind is Kind.F), []).append(work.microbatch)
    return any(orders[stage, True] != orders.get((stage, False)) for stage, forward in orders if forward)


def _words(job: _Job) -> str:
    """Refuses a padded vocabulary size that does not divide evenly over pipeline ranks.

    It may come from a checkpoint.
    """
    words = job.spec.vocabulary
    if not _VOCABULARY.holds(job) or words is None or job.spec.divisible(words) == words:
        return ""
    across, given = job.spec.sizes.tensor * job.spec.sizes.pipeline, _VOCABULARY.words.format_map(job.spec.flags)
    return (
        f"{given}has {words} words as padded, which do not divide by tensor x pipeline parallel = "
        f"{across}: give --vocab-size or a tokenizer, and leave out what says the padded size"
    )


_OTHER_GRAPHS = {
    "local": "its graphs of layers have no weight gradients that a plan places",
}
_FP8_RECIPES = ("tensorwise", "delayed", "blockwise", "mxfp8")
_OUT, _ONE_OUT = "leave the flag out", "leave one of the two out"
_STOCK_CHUNKS = f"the schedule sets the number of chunks itself; {_OUT}"
_OWN_WEIGHTS = f"the schedule places weight gradients itself; {_OUT}"
_NOT_TRIED = f"grouped weights of fused experts were not tried; {_OUT}"
_NO_WEIGHTS = (
    "this schedule does not split the backward, so no weight gradients are left to run behind messages; use one that "
    f"does, such as zb-1p or v-half, or {_OUT}"
)
_FSDP = "use Megatron's own data parallelism or distributed optimizer"
_ONE_SHAPE = f"ranks exchange microbatches of one shape; {_ONE_OUT}"
_NOT_SPLIT = (
    "quantised linears are not split so far; use bf16, or 1f1b, interleaved-1f1b or 1f1b-v, which do not split the "
    "backward"
)
_NOT_RECOMPUTED = "a schedule does not recompute quantised layers so far; use bf16, or a schedule without R"
_QUANTISED = ("fp4_quantizer_factory", "te_precision_config_file", "kitchen_config_file", "kitchen_recipe_number")
_RULES = (
    _layers,
    _ends,
    _flag("num_layers_per_virtual_pipeline_stage", _STOCK_CHUNKS),
    _flag("num_virtual_stages_per_pipeline_rank", _STOCK_CHUNKS),
    _linears,
    _flag("use_transformer_engine_op_fuser", f"fused linears of an MLP are not split; {_OUT}", _SPLIT_DENSE_TE),
    _flag("overlap_dispatch_backward_with_experts_wgrad", _OWN_WEIGHTS, _SPLIT_TE),
    _flag("moe_single_grouped_weight", _NOT_TRIED, _FUSED_EXPERTS),
    _flag("moe_single_grouped_bias", _NOT_TRIED, _FUSED_EXPERTS),
    _fp8_recipe,
    _fp8_order,
    *(_flag(name, _NOT_SPLIT, _SPLIT_TE) for name in _QUANTISED),
    *(_flag(name, _NOT_RECOMPUTED, _RECOMPUTE) for name in _QUANTISED),
    _flag(
        "fp8",
        "scales change between F and R; use tensorwise, blockwise or mxfp8, or a schedule without R",
        _DELAYED_RECOMPUTE,
        "--fp8-recipe delayed",
    ),
    _flag("te_rng_tracker", f"its random states cannot be restored one by one; {_OUT}", _RECOMPUTE),
    _flag(
        "recompute_granularity",
        f"both recompute whole layers; {_OUT}, or give selective",
        _TWICE,
        "--recompute-granularity full",
    ),
    _flag("enable_cuda_graph", f"{_OTHER_GRAPHS['local']}; {_OUT}"),
    _graphs,
    _flag("overlap_moe_expert_parallel_comm", _NO_WEIGHTS, _WHOLE),
    _flag("delay_wgrad_compute", _NO_WEIGHTS, _WHOLE),
    _flag("moe_shared_expert_overlap", f"both run behind the same messages; {_ONE_OUT}", _HIDES),
    _flag("overlap_moe_expert_parallel_comm", f"experts send no messages; {_OUT}", _NO_MESSAGES),
    _flag(
        "fine_grained_activation_offloading",
        "it counts on Megatron's own schedule; use --pipeline-save-memory offload instead",
    ),
    _flag("use_torch_fsdp2", _FSDP),
    _flag("use_megatron_fsdp", _FSDP),
    _flag("step_batch_size_schedule", "a CSV is for one number of microbatches", _CSV),
    _flag(
        "ckpt_format",
        "it stores layers by their number on the rank, and a job with another schedule would take them for others; "
        f"{_OUT}, and checkpoints go from any schedule to any other",
        _OLD_FORMAT,
        "--ckpt-format torch",
    ),
    _flag(
        "ckpt_format",
        f"it does not say which words a rank holds; {_OUT}",
        _WORDS_IN_OLD_FORMAT,
        "--ckpt-format torch",
    ),
    _flag(
        "ckpt_convert_format",
        "the format torch does not say which layers or words a rank holds; convert without --pipeline-schedule",
        _MOVED,
    ),
    _flag("inprocess_restart", f"after a restart it would go on in the process groups of the first start; {_OUT}"),
    _words,
    _flag("sft", _ONE_SHAPE, _VOCABULARY),
    _flag("variable_seq_lengths", _ONE_SHAPE, _VOCABULARY, "args.variable_seq_lengths"),
    _flag("dataloader_inter_document_masking", _ONE_SHAPE, _VOCABULARY),
    _flag("fp8_output_proj", f"its part of the output layer is not quantised; {_ONE_OUT}", _VOCABULARY),
    _flag("use_mup", f"its logits are scaled; {_ONE_OUT}", _VOCABULARY),
    _flag("logit_dtype", f"its logits have the type of its input; {_ONE_OUT}", _VOCABULARY, "--output-logit-dtype"),
    _flag("init_model_with_meta_device", f"the first weights are sent to the ranks; {_ONE_OUT}", _VOCABULARY),
    _flag("num_microbatches_with_partial_activation_checkpoints", f"it counts on Megatron's own schedule; {_OUT}"),
)
