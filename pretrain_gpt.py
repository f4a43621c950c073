#!/usr/bin/env python3
"""Pretrain GPT with stock Megatron; ``--pipeline-schedule NAME`` chooses the order of the pipeline's passes.

Takes every flag of Megatron's, and runs on one device, under torchrun or under SLURM as any Megatron script does.
"""

from __future__ import annotations

import sys

from megatron.schedules.integration import cpu_standin

if cpu_standin.needed():
    cpu_standin.enable()

from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

from megatron.schedules import install
from megatron.schedules.integration import gpt


def main() -> None:
    """Parse, build, train."""
    gpt.refuse_other_data(sys.argv[1:])
    install()
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, gpt.datasets_provider, ModelType.encoder_or_decoder, gpt.forward_step)


if __name__ == "__main__":
    main()
