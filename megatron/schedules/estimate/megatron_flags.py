"""A model's shape from Megatron's flags, as its parser leaves them or as they stand in a file."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from megatron.schedules.estimate.bounds import check_bounds
from megatron.schedules.estimate.layer_pattern import moe_freq_type
from megatron.schedules.estimate.shape import Experts, Shape
from megatron.schedules.estimate.transformer import Latent
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.parsing import read_text

Flags = Mapping[str, tuple[Callable[[Any], Any] | None, Any]]
"""What stock's parser makes of each flag: kind of value (None: a switch), and what it is without the flag."""

FLAGS: Flags = {
    "--attention-dropout": (float, 0.1),
    "--expert-model-parallel-size": (int, 1),
    "--ffn-hidden-size": (int, None),
    "--group-query-attention": (None, False),
    "--hidden-dropout": (float, 0.1),
    "--hidden-size": (int, None),
    "--kv-channels": (int, None),
    "--kv-lora-rank": (int, 32),
    "--make-vocab-size-divisible-by": (int, 128),
    "--moe-ffn-hidden-size": (int, None),
    "--moe-layer-freq": (moe_freq_type, 1),
    "--moe-router-topk": (int, 2),
    "--moe-shared-expert-intermediate-size": (int, None),
    "--mtp-num-layers": (int, None),
    "--multi-latent-attention": (None, False),
    "--num-attention-heads": (int, None),
    "--num-experts": (int, None),
    "--num-layers": (int, None),
    "--num-query-groups": (int, 1),
    "--q-lora-rank": (int, None),
    "--qk-head-dim": (int, 128),
    "--qk-pos-emb-head-dim": (int, 64),
    "--seq-length": (int, None),
    "--swiglu": (None, False),
    "--tensor-model-parallel-size": (int, 1),
    "--transformer-impl": (str, "transformer_engine"),
    "--v-head-dim": (int, 128),
    "--vocab-size": (int, None),
}
_NEEDED = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--vocab-size")


def attribute(flag: str) -> str:
    """What a parsed flag is called."""
    return flag[2:].replace("-", "_")


def declare(parser: argparse.ArgumentParser, flags: Flags, otherwise: Mapping[str, str] | None = None) -> None:
    """Add ``flags`` to ``parser``; ``otherwise`` names those that are parsed to another attribute than their own."""
    for flag, (kind, default) in flags.items():
        options: dict[str, Any] = {"dest": (otherwise or {}).get(flag, attribute(flag)), "default": default}
        if kind is None:
            parser.add_argument(flag, action="store_false" if default else "store_true", **options)
        elif kind is list:
            parser.add_argument(flag, nargs="+", **options)
        else:
            parser.add_argument(flag, type=kind, **options)


def shape(args: Any, vocabulary: int) -> Shape:
    """The model that Megatron's ``args`` describe, validated or not.

    Args:
        args: an attribute for each of :data:`FLAGS`.
        vocabulary: as padded; 0 where it is not known.
    """
    hidden, heads = args.hidden_size, args.num_attention_heads
    # A gated part of two thirds has as many parameters as a plain one; stock rounds down to whole tiles.
    inner = args.ffn_hidden_size or (4 * hidden if not args.swiglu else 8 * hidden // 3 // 64 * 64)
    latent = None
    if args.multi_latent_attention:
        latent = Latent(
            args.q_lora_rank, args.kv_lora_rank, args.qk_head_dim, args.qk_pos_emb_head_dim, args.v_head_dim
        )
    experts = None
    if args.num_experts:
        experts = Experts(
            where=_with_experts(args.moe_layer_freq, args.num_layers),
            inner=args.moe_ffn_hidden_size or inner,
            chosen=args.moe_router_topk,
            number=args.num_experts / args.expert_model_parallel_size,
            shared=args.moe_shared_expert_intermediate_size or 0,
        )
    return Shape(
        args.num_layers,
        hidden,
        heads,
        args.seq_length,
        vocabulary,
        width=heads * args.kv_channels if args.kv_channels else None,
        groups=args.num_query_groups if args.group_query_attention else heads,
        inner=inner,
        gated=bool(args.swiglu),
        fused=args.transformer_impl != "local",
        latent=latent,
        experts=experts,
        ahead=args.mtp_num_layers or 0,
        masks=(args.attention_dropout > 0, args.hidden_dropout > 0),
    )


def padded(words: int, args: Any) -> int:
    """The vocabulary as stock pads it, so that tensor-parallel ranks have equal parts of it."""
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return -(-words // multiple) * multiple


def read(path: Path) -> Shape:
    """The model that the flags in the file ``path`` describe; what is no flag of a model's shape is passed over.

    Raises:
        PlanError: in one line, what is wrong with the file.
    """
    text = read_text(path, "model")
    try:
        # As in a shell: lines go on after a backslash, and comments are none of it.
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise PlanError(f"{path}: {str(error).lower()}", "model") from None
    parser = _Parser(add_help=False, allow_abbrev=False)
    declare(parser, FLAGS)
    try:
        args, _ = parser.parse_known_args(words)
        check_bounds(args)
        if missing := [flag for flag in _NEEDED if getattr(args, attribute(flag)) is None]:
            raise ValueError(f"it lacks {', '.join(missing)}")
        return shape(args, padded(args.vocab_size, args))
    except ValueError as error:
        raise PlanError(f"{path} holds no model in Megatron's flags: {error}", "model") from None


def _with_experts(frequency: int | list[int], layers: int) -> tuple[bool, ...]:
    if isinstance(frequency, int):
        return tuple(layer % frequency == 0 for layer in range(layers))
    if len(frequency) != layers:
        raise ValueError(f"--moe-layer-freq names {len(frequency)} layers and --num-layers {layers}")
    return tuple(map(bool, frequency))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)
