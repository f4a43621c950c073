"""Reads a model's shape from Megatron's flags, parsed or in a file."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from megatron.schedules.estimate.bounds import check_bounds
from megatron.schedules.estimate.layer_pattern import hybrid_layers, model_layers, moe_freq_type
from megatron.schedules.estimate.shape import DeltaNet, Experts, Indexer, Latent, Mamba, Shape
from megatron.schedules.utils.errors import PlanError

Flags = Mapping[str, tuple[Callable[[Any], Any] | tuple[Callable[[Any], Any], int | str] | None, Any]]
"""For each flag the type of its value (None for a switch), or type and ``nargs``, and its default in Megatron's."""

# Switches that are off, and on, without the flag; and whole numbers without a default.
_OFF = """
    account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split accumulate-allreduce-grads-in-fp32
    add-qkv-bias attention-output-gate bf16 cross-entropy-loss-fusion first-last-layers-bf16 fp16
    fp32-residual-connection fp4-param-gather fp8-output-proj fp8-param-gather grad-reduce-in-bf16
    group-query-attention moe-shared-expert-gate multi-latent-attention optimizer-cpu-offload
    overlap-moe-expert-parallel-comm qk-layernorm sequence-parallel swiglu use-distributed-optimizer
    use-precision-aware-optimizer use-rotary-position-embeddings
"""
_ON = """
    disable-bias-linear no-bias-swiglu-fusion no-create-attention-mask-in-dataloader
    no-gradient-accumulation-fusion no-position-embedding no-rope-fusion
"""
_INTEGERS = """
    dsa-indexer-head-dim dsa-indexer-n-heads dsa-indexer-topk expert-tensor-parallel-size ffn-hidden-size
    global-batch-size hidden-size kv-channels mamba-num-heads max-position-embeddings micro-batch-size
    moe-ffn-hidden-size moe-latent-size moe-shared-expert-intermediate-size mtp-num-layers num-attention-heads
    num-experts num-layers padded-vocab-size q-lora-rank recompute-num-layers seq-length vocab-size
"""
FLAGS: Flags = {
    **{f"--{name}": (None, False) for name in _OFF.split()},
    **{f"--{name}": (None, True) for name in _ON.split()},
    **{f"--{name}": (int, None) for name in _INTEGERS.split()},
    "--attention-dropout": (float, 0.1),
    "--context-parallel-size": (int, 1),
    "--cross-entropy-fusion-impl": (str, "native"),
    "--dsa-indexer-loss-coeff": (float, None),
    "--dsa-kernel-backend": (str, "none"),
    "--exp-avg-dtype": (str, "fp32"),
    "--exp-avg-sq-dtype": (str, "fp32"),
    "--fp4-format": (str, None),
    "--fp8-format": (str, None),
    "--fp8-recipe": (str, "delayed"),
    "--expert-model-parallel-size": (int, 1),
    "--hidden-dropout": (float, 0.1),
    "--hybrid-layer-pattern": (str, None),
    "--hybrid-override-pattern": (str, None),
    "--kv-lora-rank": (int, 32),
    "--linear-conv-kernel-dim": (int, 4),
    "--linear-key-head-dim": (int, 128),
    "--linear-num-key-heads": (int, 16),
    "--linear-num-value-heads": (int, 32),
    "--linear-value-head-dim": (int, 128),
    "--main-grads-dtype": (str, "fp32"),
    "--make-vocab-size-divisible-by": (int, 128),
    "--mamba-head-dim": (int, 64),
    "--mamba-num-groups": (int, 8),
    "--mamba-state-dim": (int, 128),
    "--moe-flex-dispatcher-backend": (str, "deepep"),
    "--moe-layer-freq": (moe_freq_type, 1),
    "--moe-router-topk": (int, 2),
    "--moe-token-dispatcher-type": (str, "allgather"),
    "--mtp-hybrid-override-pattern": (str, None),
    "--normalization": (str, "LayerNorm"),
    "--num-distributed-optimizer-instances": (int, 1),
    "--num-layers-at-end-in-bf16": (int, 1),
    "--num-layers-at-start-in-bf16": (int, 1),
    "--num-query-groups": (int, 1),
    "--optimizer": (str, "adam"),
    "--optimizer-offload-fraction": (float, 1.0),
    "--position-embedding-type": (str, "learned_absolute"),
    "--qk-head-dim": (int, 128),
    "--qk-pos-emb-head-dim": (int, 64),
    "--recompute-granularity": (str, None),
    "--recompute-method": (str, None),
    "--recompute-modules": (list, None),
    "--sgd-momentum": (float, 0.9),
    "--tensor-model-parallel-size": (int, 1),
    "--transformer-impl": (str, "transformer_engine"),
    "--v-head-dim": (int, 128),
}
# Flags whose attribute has another name.
NAMED_OTHERWISE = {
    "--disable-bias-linear": "add_bias_linear",
    "--fp4-format": "fp4",
    "--fp8-format": "fp8",
    "--no-bias-swiglu-fusion": "bias_swiglu_fusion",
    "--no-create-attention-mask-in-dataloader": "create_attention_mask_in_dataloader",
    "--no-gradient-accumulation-fusion": "gradient_accumulation_fusion",
    "--no-position-embedding": "add_position_embedding",
    "--no-rope-fusion": "apply_rope_fusion",
}
_VARIABLE = re.compile(r"\$(?:(?P<name>\w+)|\{(?P<braced>\w+)(?::?[-=](?P<default>[^}]*))?\})")
_NEEDED = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--vocab-size")


def attribute(flag: str) -> str:
    """Returns the attribute name of a flag."""
    return flag[2:].replace("-", "_")


def declare(parser: argparse.ArgumentParser, flags: Flags, otherwise: Mapping[str, str] | None = None) -> None:
    """Adds ``flags`` to ``parser``. ``otherwise`` maps flags to attributes with other names."""
    for flag, (kind, default) in flags.items():
        options: dict[str, Any] = {"dest": (otherwise or {}).get(flag, attribute(flag)), "default": default}
        if kind is None:
            parser.add_argument(flag, action="store_false" if default else "store_true", **options)
        elif kind is list:
            parser.add_argument(flag, nargs="+", **options)
        elif isinstance(kind, tuple):
            parser.add_argument(flag, type=kind[0], nargs=kind[1], **options)
        else:
            parser.add_argument(flag, type=kind, **options)


def shape(args: Any, vocabulary: int) -> Shape:
    """Returns the shape of the model in Megatron's ``args``, validated or not.

    Args:
        args: an attribute for each of :data:`FLAGS`.
        vocabulary: padded number of words; 0 if unknown.
    """
    hidden, heads = args.hidden_size, args.num_attention_heads
    # A gated MLP of two thirds the width has as many parameters; Megatron rounds down to whole tiles.
    inner = args.ffn_hidden_size or (4 * hidden if not args.swiglu else 8 * hidden // 3 // 64 * 64)
    experts = None
    if args.num_experts:
        experts = Experts(
            inner=args.moe_ffn_hidden_size or inner,
            chosen=args.moe_router_topk,
            number=args.num_experts / args.expert_model_parallel_size,
            shared=args.moe_shared_expert_intermediate_size or 0,
            latent=args.moe_latent_size or 0,
        )
    layers, ahead = model_layers(args)
    parts = {*"".join(layers + ahead)}
    return Shape(
        layers,
        hidden,
        heads,
        args.seq_length,
        vocabulary,
        width=heads * args.kv_channels if args.kv_channels else None,
        groups=args.num_query_groups if args.group_query_attention else heads,
        inner=inner,
        gated=bool(args.swiglu),
        fused=args.transformer_impl != "local",
        latent=_latent(args) if args.multi_latent_attention or parts & {*"+D"} else None,
        experts=experts,
        mamba=_mamba(args) if "M" in parts else None,
        delta=_delta_net(args) if "G" in parts else None,
        indexer=_indexer(args) if "D" in parts else None,
        ahead=ahead,
        masks=(args.attention_dropout > 0, args.hidden_dropout > 0),
    )


def _latent(args: Any) -> Latent:
    return Latent(args.q_lora_rank, args.kv_lora_rank, args.qk_head_dim, args.qk_pos_emb_head_dim, args.v_head_dim)


def _mamba(args: Any) -> Mamba:
    heads = args.mamba_num_heads or 2 * args.hidden_size // args.mamba_head_dim
    return Mamba(heads, args.mamba_head_dim, args.mamba_state_dim, args.mamba_num_groups)


def _delta_net(args: Any) -> DeltaNet:
    return DeltaNet(
        args.linear_num_key_heads,
        args.linear_num_value_heads,
        args.linear_key_head_dim,
        args.linear_value_head_dim,
        args.linear_conv_kernel_dim,
    )


def _indexer(args: Any) -> Indexer:
    sizes = {"heads": "dsa_indexer_n_heads", "head": "dsa_indexer_head_dim", "chosen": "dsa_indexer_topk"}
    if missing := [name for name in sizes.values() if not getattr(args, name)]:
        raise ValueError(f"sparse attention (D) needs --{missing[0].replace('_', '-')}: give it")
    trained, kernels = bool(args.dsa_indexer_loss_coeff), args.dsa_kernel_backend != "none"
    return Indexer(**{of: getattr(args, name) for of, name in sizes.items()}, trained=trained, kernels=kernels)


def padded(words: int, args: Any) -> int:
    """Returns the vocabulary size as Megatron pads it for tensor-parallel ranks."""
    multiple: int = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return -(-words // multiple) * multiple


def parse(text: str, name: str) -> argparse.Namespace:
    """Parses the flags of a model in ``text`` as Megatron's parser does, and ignores everything else.

    Shell variables that ``text`` sets, or that have a default, are expanded.

    Args:
        text: flags, or a shell script with flags.
        name: name of the model or its file, for errors.

    Raises:
        PlanError: if the flags describe no model.
    """
    if name.lower().endswith((".yaml", ".yml")):
        raise PlanError(f"{name}: YAML is not read: name a script or a file with Megatron's flags", "model")
    try:
        words = script_words(text)
    except ValueError as error:
        raise PlanError(f"{name}: {str(error).lower()}", "model") from None
    parser = _Parser(add_help=False, allow_abbrev=False)
    declare(parser, FLAGS, NAMED_OTHERWISE)
    try:
        args, _ = parser.parse_known_args(words)
        check_bounds(args)
        if args.vocab_size is None and args.padded_vocab_size:
            args.vocab_size = args.padded_vocab_size
        if (hybrid := hybrid_layers(args)) is not None:  # says how many layers there are
            args.num_layers, args.mtp_num_layers = len(hybrid.layers), len(hybrid.ahead)
        if missing := [flag for flag in _NEEDED if getattr(args, attribute(flag)) is None]:
            raise ValueError(
                f"it lacks {', '.join(missing)}: add what is missing behind the name, as in '{name} {missing[0]} N'"
            )
        shape(args, padded(args.vocab_size, args))
        return args
    except ValueError as error:
        raise PlanError(f"{name} holds no model in Megatron's flags: {error}", "model") from None


def script_words(text: str) -> list[str]:
    """Returns the words of a script with arrays unwrapped, and with the value of each variable.

    That is the last that the script sets, else one that is exported, else the default.

    Raises:
        ValueError: a quotation is not closed.
    """
    # As in a shell: a backslash continues a line.
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    values: dict[str, str] = {}
    expanded: list[str] = []
    for word in words:
        word = re.sub(r"^\w+\+?=\(", "", word)  # the first of an array
        word = word[:-1] if word.count(")") > word.count("(") else word
        is_variable = _VARIABLE.fullmatch(word)
        word = _VARIABLE.sub(lambda variable: _value(variable, values), word)
        if set_here := re.fullmatch(r"(\w+)=(.*)", word, re.DOTALL):
            values[set_here[1]] = set_here[2]
        else:
            expanded += word.split() if is_variable else [word]
    return expanded


def _value(variable: re.Match[str], values: Mapping[str, str]) -> str:
    """Value of a shell variable; its own text if nothing sets it."""
    name = variable["name"] or variable["braced"]
    return values.get(name) or os.environ.get(name) or variable["default"] or variable[0]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if unset := _VARIABLE.search(message):
            flag = message.removeprefix("argument ").partition(":")[0]
            raise ValueError(f"{flag} is {unset[0]}, which nothing sets: export it, or set it in the file")
        raise ValueError(message)
