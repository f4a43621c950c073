"""A script for hybrid models that builds and reads as Megatron-LM's own ``pretrain_hybrid.py`` does.

It builds its model in a provider. It asks stock where multi-token prediction is, and asks for the first and the last
stage without the number of the chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.transformer.spec_utils import import_module
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_tp_rank
from megatron.training import get_args
from megatron.training.argument_utils import core_transformer_config_from_args
from megatron.training.utils import is_first_or_last_pipeline_stage

import pretrain_gpt
from megatron.schedules.integration import gpt

_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def put_in_place() -> None:
    """Has the main program run this script."""
    stock_pretrain = pretrain_gpt.pretrain

    def pretrain(config: Any, *rest: Any, **named: Any) -> None:
        config.model = None
        stock_pretrain(config, *rest, model_provider, **named)

    pretrain_gpt.pretrain = pretrain
    gpt.datasets_provider, gpt.forward_step = datasets, forward_step


def model_provider(
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, **given: Any
) -> HybridModel:
    """The rank's part of the model."""
    args = get_args()
    return HybridModel(
        config=given.get("config") or core_transformer_config_from_args(args),
        hybrid_stack_spec=import_module(args.spec),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        hybrid_layer_pattern=args.hybrid_layer_pattern,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        pg_collection=given.get("pg_collection"),
        vp_stage=vp_stage,
    )


def datasets(num_samples: list[int], vp_stage: int | None = None) -> Any:
    """Mock data on the stages that read."""
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )

    def built_here() -> bool:
        return parallel_state.get_tensor_model_parallel_rank() == 0 and _reads(vp_stage)

    return BlendedMegatronDatasetBuilder(MockGPTDataset, num_samples, built_here, config).build()


datasets.is_distributed = True  # type: ignore[attr-defined]


def forward_step(
    samples: Iterator[Any] | None, model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    """One microbatch through the rank's part of the model."""
    stage = get_attr_wrapped_model(model, "vp_stage")
    batch = _batch(samples, stage) if _reads(stage) else dict.fromkeys(_KEYS)
    read = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
    return model(*read, labels=batch["labels"], loss_mask=batch["loss_mask"]), partial(gpt.loss, batch["loss_mask"])


def _predicts_ahead(stage: int | None) -> bool:
    config = core_transformer_config_from_args(get_args())
    layout = config.pipeline_model_parallel_layout
    return bool(mtp_on_this_rank(layout, config.mtp_num_layers, ignore_virtual=False, vp_stage=stage))


def _reads(stage: int | None) -> bool:
    return bool(is_first_or_last_pipeline_stage(stage)) or _predicts_ahead(stage)


def _batch(samples: Iterator[Any] | None, stage: int | None) -> dict[str, Any]:
    args, tensor_rank = get_args(), parallel_state.get_tensor_model_parallel_rank()
    read: dict[str, Any] = {}
    if tensor_rank == 0:
        assert samples is not None, "a stage that reads has an iterator"
        read = {key: value.cuda() for key, value in next(samples).items()}
    batch: dict[str, Any] = get_batch_on_this_tp_rank(
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
        mtp_on_this_rank=_predicts_ahead(stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(),
    )
    return batch
