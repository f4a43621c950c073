"""A script for Megatron-LM's loop that reads samples only on the stages of which it thinks that they need them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset, MockGPTLowLevelDataset
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_tp_rank
from megatron.training import get_args
from megatron.training.utils import is_first_or_last_pipeline_stage

from megatron.schedules.integration import gpt

Reads = Callable[[int | None], bool]


def put_in_place(samples: str) -> None:
    """Has the main program run this script.

    Its ``samples``, of several documents each, are read where "Megatron says", as in Megatron-LM's own scripts, or "at
    the ends" that it finds.
    """
    reads = {"Megatron says": _says_megatron, "at the ends": _is_end}[samples]
    MockGPTLowLevelDataset.max_sequence_length = 9
    gpt.datasets_provider, gpt.forward_step = provider(reads), partial(_forward_step, reads)


def _says_megatron(stage: int | None) -> bool:
    return bool(is_first_or_last_pipeline_stage(stage))


def _is_end(stage: int | None) -> bool:
    return any(_ends(stage))


def _ends(stage: int | None) -> tuple[bool, bool]:
    where: Any = {"ignore_virtual": stage is None, "vp_stage": stage}
    return parallel_state.is_pipeline_first_stage(**where), parallel_state.is_pipeline_last_stage(**where)


def provider(reads: Reads) -> Any:
    """Provides mock data on the stages that read."""
    provided = partial(_datasets, reads)
    provided.is_distributed = True  # type: ignore[attr-defined]
    return provided


def _datasets(reads: Reads, num_samples: list[int], vp_stage: int | None = None) -> Any:
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )

    def built_here() -> bool:
        return parallel_state.get_tensor_model_parallel_rank() == 0 and reads(vp_stage)

    return BlendedMegatronDatasetBuilder(MockGPTDataset, num_samples, built_here, config).build()


def _forward_step(
    reads: Reads, samples: Iterator[Any] | None, model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[..., Any]]:
    stage = get_attr_wrapped_model(model, "vp_stage")
    batch = read_batch(samples, *_ends(stage)) if reads(stage) else dict.fromkeys(KEYS)
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, partial(gpt.loss, batch["loss_mask"])


KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def read_batch(samples: Iterator[Any] | None, first: bool, last: bool, *, ahead: bool = False) -> dict[str, Any]:
    """A microbatch on a stage that reads: the first, the last, or one that predicts several tokens ahead."""
    args, tensor_rank = get_args(), parallel_state.get_tensor_model_parallel_rank()
    read = {} if tensor_rank or samples is None else dict(next(samples))
    found: dict[str, Any] = get_batch_on_this_tp_rank(
        read,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=1,
        tp_rank=tensor_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=ahead,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=first,
        is_pipeline_last_stage=last,
    )
    return found
