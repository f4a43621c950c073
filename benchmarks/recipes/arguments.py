"""Megatron's arguments of a recipe: of a Megatron-LM script, or of a ``ConfigContainer`` of Megatron-Bridge."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

from megatron.schedules.estimate.build import Adapters
from megatron.schedules.estimate.megatron_flags import script_words
from megatron.schedules.integration.flags.declared import FIELDS, add_arguments, layout_text
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.parsing import read_text
from tools._parsing import Parser

# Parts of a ConfigContainer in which Megatron-LM's arguments are; values of later parts count.
_PARTS = "rng", "checkpoint", "train", "ddp", "optimizer", "model", "mixed_precision", "comm_overlap"
# These two override the others, with the values that are set.
_OVERRIDE = "mixed_precision", "comm_overlap"
# Fields that Megatron-LM calls otherwise.
_NAMES = {field: argument for argument, field in FIELDS.items()}
_NAMES["grad_reduce_in_fp32"] = "accumulate_allreduce_grads_in_fp32"
_DTYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.uint8": "fp8"}


def of_script(file: Path, gpus: int) -> argparse.Namespace:
    """Returns the arguments in a script for Megatron-LM, or in a file with its flags.

    Raises:
        PlanError: the file cannot be read.
    """
    parser = _parser()
    try:
        args, _ = parser.parse_known_args(script_words(read_text(file, "model")))
    except ValueError as error:
        raise PlanError(f"{file}: {error}") from None
    args.world_size = gpus
    return args


def of_container(config: Any, gpus: int) -> argparse.Namespace:
    """Returns the arguments that Megatron-LM would have for a ``ConfigContainer``.

    Args:
        config: the configuration, or any object with these parts.
        gpus: GPUs of the job.
    """
    args = _parser().parse_args([])
    for name in _PARTS:
        part = getattr(config, name, None)
        for field, value in {} if part is None else vars(part).items():
            if value is not None or name not in _OVERRIDE:
                setattr(args, _NAMES.get(field, field), _DTYPES.get(str(value), value))
    args.world_size = gpus
    args.adapters = _adapters(getattr(config, "peft", None))
    args.group_query_attention = args.num_query_groups not in (None, args.num_attention_heads)
    # Megatron-LM adds gradients up in single precision unless this flag is given, Bridge if it is told to.
    args.grad_reduce_in_bf16 = args.bf16 and not args.accumulate_allreduce_grads_in_fp32
    args.padded_vocab_size = None if getattr(args, "should_pad_vocab", True) else args.vocab_size
    if getattr(getattr(config, "dataset", None), "skip_getting_attention_mask_from_dataset", True):
        args.create_attention_mask_in_dataloader = False
    if args.recompute_granularity == "selective" and args.recompute_modules == []:
        args.recompute_granularity = None
    if not isinstance(args.pipeline_model_parallel_layout, str | None):
        args.pipeline_model_parallel_layout = layout_text(args.pipeline_model_parallel_layout)
    return args


def _adapters(peft: Any) -> Adapters | None:
    return None if peft is None else Adapters(peft.dim, frozenset(name.split(".")[-1] for name in peft.target_modules))


def _parser() -> argparse.ArgumentParser:
    """Returns Megatron's own parser with our flags."""
    megatron: Any = importlib.import_module("megatron.training.arguments")
    return add_arguments(megatron.add_megatron_arguments(Parser(allow_abbrev=False, add_help=False)))
