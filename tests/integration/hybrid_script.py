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
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.transformer.spec_utils import import_module
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args
from megatron.training.argument_utils import core_transformer_config_from_args
from megatron.training.utils import is_first_or_last_pipeline_stage

import pretrain_gpt
from megatron.schedules.integration import gpt
from tests.integration.reading_script import KEYS, provider, read_batch


def put_in_place() -> None:
    """Has the main program run this script."""
    stock_pretrain = pretrain_gpt.pretrain

    def pretrain(config: Any, *rest: Any, **named: Any) -> None:
        config.model = None
        stock_pretrain(config, *rest, model_provider, **named)

    pretrain_gpt.pretrain = pretrain
    gpt.datasets_provider, gpt.forward_step = provider(_reads), forward_step


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


def forward_step(
    samples: Iterator[Any] | None, model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    """One microbatch through the rank's part of the model."""
    stage = get_attr_wrapped_model(model, "vp_stage")
    batch = dict.fromkeys(KEYS)
    if _reads(stage):
        ends = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        batch = read_batch(samples, *ends, ahead=_predicts_ahead(stage))
    read = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
    return model(*read, labels=batch["labels"], loss_mask=batch["loss_mask"]), partial(gpt.loss, batch["loss_mask"])


def _predicts_ahead(stage: int | None) -> bool:
    config = core_transformer_config_from_args(get_args())
    layout = config.pipeline_model_parallel_layout
    return bool(mtp_on_this_rank(layout, config.mtp_num_layers, ignore_virtual=False, vp_stage=stage))


def _reads(stage: int | None) -> bool:
    return bool(is_first_or_last_pipeline_stage(stage)) or _predicts_ahead(stage)
