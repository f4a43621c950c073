"""A training script that knows stock Megatron alone: who loads our checkpoints need not have this package."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

_PACKAGE = "megatron.schedules"


class _Nowhere:
    """Finds no module of this package, and lets nobody else find one."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        if name == _PACKAGE or name.startswith(_PACKAGE + "."):
            raise ModuleNotFoundError(f"{name} is not installed in this process", name=name)


def forget_the_package() -> None:
    """Make this process one without our package; what the CPU stand-in has replaced in torch stays replaced."""
    for name in list(sys.modules):
        if name == _PACKAGE or name.startswith(_PACKAGE + "."):
            del sys.modules[name]
    sys.meta_path.insert(0, _Nowhere())
    try:
        __import__(_PACKAGE)
    except ModuleNotFoundError:
        return
    raise AssertionError(f"{_PACKAGE} can still be imported")


def datasets(num_samples: list[int], vp_stage: int | None = None) -> Any:
    """Mock data on every rank."""
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=True,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, num_samples, lambda: True, config).build()


datasets.is_distributed = True  # type: ignore[attr-defined]


def forward_step(samples: Iterator[Any], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """One microbatch through the rank's part of the model."""
    batch = next(samples)
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, partial(_loss, batch["loss_mask"])


def _loss(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    total, count = (output.float() * mask).sum(), mask.sum().int()
    return total, count, {"lm loss": torch.stack([total.detach(), count.float()])}


def main() -> None:
    """Train as the command line says."""
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
