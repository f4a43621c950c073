"""GPT pretraining on stock Megatron: data, batches and loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage
from torch import Tensor

from megatron.schedules.integration.cpu import standin
from megatron.schedules.integration.gpt_data import masks_documents, packs, sequences_per_dataset
from megatron.schedules.integration.gpu_libraries import te_missing
from megatron.schedules.integration.refuse import refuse

# Dataset settings that differ in name from their Megatron flag.
_FLAG_OF = {
    "random_seed": "seed",
    "sequence_length": "seq_length",
    "path_to_cache": "data_cache_path",
    "create_attention_mask": "create_attention_mask_in_dataloader",
    "inter_document_masking": "dataloader_inter_document_masking",
    "fast_cache_load": "dataloader_fast_cache_load",
    "defer_npy_index_mmap": "dataloader_defer_npy_index_mmap",
}
_BATCH = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask", "cu_seqlens", "max_seqlen")


def refuse_engine_without_gpu(args: Any) -> None:
    """Refuses Megatron's default layers on a CPU, with a schedule or not: building them would end in a TypeError."""
    flag = "--transformer-impl transformer_engine"
    if standin.enabled() and args.transformer_impl in flag.split() and (fault := te_missing()):
        refuse(f"{flag} does not work here: {fault}; on a CPU give --transformer-impl local")


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> Any:
    """Builds training, validation and test data as the flags say, on ranks whose chunk ``vp_stage`` reads data.

    Every chunk reads data if its attention needs the samples' bounds or their masks.
    """
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    read = {field.name: _FLAG_OF.get(field.name, field.name) for field in fields(GPTDatasetConfig) if field.init}
    settings = {name: getattr(args, flag) for name, flag in read.items() if hasattr(args, flag)}
    settings["create_attention_mask"] = _masks()
    config = GPTDatasetConfig(
        **settings, blend=blend, blend_per_split=blend_per_split, tokenizer=build_tokenizer(args), **_counts()
    )
    kind = SFTDataset if args.sft else MockGPTDataset if args.mock_data else GPTDataset

    def built_here() -> bool:
        return _reads(vp_stage) and mpu.get_tensor_model_parallel_rank() == 0

    return BlendedMegatronDatasetBuilder(kind, num_samples, built_here, config).build()


# Stock reads this attribute: every rank calls the provider, and the builder decides which ranks load data.
datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def forward_step(data_iterator: Iterator[Any] | None, model: torch.nn.Module) -> tuple[Tensor, Any]:
    """Runs one chunk's forward on the next microbatch. Returns its output and its loss function."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    batch = _next_batch(data_iterator, vp_stage)
    timers("batch-generator").stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=_packed_sequences(batch),
    )
    return output, partial(loss, batch["loss_mask"])


def _packed_sequences(batch: dict[str, Any]) -> PackedSeqParams | None:
    """Sequence bounds of a sample, as attention reads them; None if a sample is one sequence.

    Args:
        batch: has ``cu_seqlens``, shape (1, sequence + 1): the bounds from 0 on, padded with the sample's end; and
            ``max_seqlen``, shape (1).
    """
    if batch["cu_seqlens"] is None:
        return None
    bounds = flatten_batch_for_packed_sequences(batch)["cu_seqlens"][0]
    longest = int(batch["max_seqlen"])
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _counts() -> dict[str, Any]:
    """Number of sequences of each data set, if a file gives it. Then not all data sets are opened."""
    path = getattr(get_args(), "per_dataset_sequences_path", None)
    return {} if path is None else {"sequences_per_dataset": sequences_per_dataset(Path(path))}


def loss(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Returns the loss summed over the unmasked tokens, their number, and both values for the report.

    Args:
        loss_mask: shape (microbatch, sequence), 1 if a token counts.
        output: shape (microbatch, sequence), the loss of each token.
    """
    mask = loss_mask.reshape(-1).float()
    total = torch.sum(output.reshape(-1).float() * mask)
    count = mask.sum().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        machine = get_rerun_state_machine()
        for rejected, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            machine.validate_result(
                result=total,
                rejection_func=rejected,
                message=f"found {name} in the loss",
                tolerance=0.0,
                fatal=True,
            )
    reported = torch.cat([total.detach().reshape(1), count.reshape(1)])
    return total, count, {"lm loss": reported}


def _masks() -> bool:
    """Returns whether samples have an attention mask. Packed samples have sequence bounds instead."""
    return get_args().create_attention_mask_in_dataloader and not packs(get_args())


def _reads(vp_stage: int | None) -> bool:
    args = get_args()
    return packs(args) or masks_documents(args) or is_first_or_last_pipeline_stage(vp_stage)


def _next_batch(data_iterator: Iterator[Any] | None, vp_stage: int | None) -> dict[str, Any]:
    """Returns the next microbatch by the names in ``_BATCH``; None for what the chunk does not need."""
    args, tp_rank = get_args(), mpu.get_tensor_model_parallel_rank()
    if not _reads(vp_stage):
        return dict.fromkeys(_BATCH)
    is_last = mpu.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)
    batch: dict[str, Any] = {}
    if tp_rank == 0:
        assert data_iterator is not None, "a chunk that reads data has an iterator"
        data = next(data_iterator)
        batch = {key: data[key].cuda(non_blocking=True) if key in data else None for key in _BATCH}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=packs(args),
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=_masks(),
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        # With it stock sends everything to any stage, otherwise no mask to those in the middle.
        mtp_on_this_rank=(bool(args.mtp_num_layers) and is_last) or masks_documents(args),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
        is_pipeline_last_stage=is_last,
    )
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())
    return {key: batch[key] for key in _BATCH}
