#!/usr/bin/env python3
"""Pretrain GPT, or a hybrid model, with stock Megatron; ``--pipeline-schedule NAME`` chooses the order of its passes.

Takes every flag of Megatron's, and runs on one device, under torchrun or under SLURM as any Megatron script does.
"""

from __future__ import annotations

import sys

from megatron.schedules.integration.dry_run import dry_run_early
from megatron.schedules.integration.flags.checks import refuse_early
from megatron.schedules.integration.gpt_data import refuse_other_data

if __name__ == "__main__":  # before the imports that take seconds
    job = refuse_early(sys.argv[1:])
    refuse_other_data(sys.argv[1:])
    if job is not None:
        dry_run_early(job)

from megatron.schedules import install, without_gpu

without_gpu()

from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import (
    gpt_config_from_args,
    hybrid_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args

from megatron.schedules.integration import gpt


def main() -> None:
    """Parse, build, train."""
    refuse_other_data(sys.argv[1:])
    install()
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    gpt.refuse_engine_without_gpu(args)
    model = gpt_config_from_args if args.hybrid_layer_pattern is None else hybrid_config_from_args
    config = pretrain_cfg_container_from_args(args, model(args))
    pretrain(config, gpt.datasets_provider, ModelType.encoder_or_decoder, gpt.forward_step)


if __name__ == "__main__":
    main()
