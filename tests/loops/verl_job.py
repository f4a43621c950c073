"""verl's engine class for Megatron in a few updates and forward-only passes, on a CPU, in bf16, which it insists on."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from tensordict import TensorDict
from transformers import Qwen2Config
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.workers.config import McoreEngineConfig, McoreOptimizerConfig, MtpConfig
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from tests.loops import small_qwen
from tests.loops.frameworks import Job
from tests.loops.ours import install
from tests.support.weights import gradient_digests

_UPDATES, _ROWS = 3, 8


def prepare(folder: Path) -> None:
    """Writes the model."""
    small_qwen.write(folder)


def train(job: Job, folder: Path) -> tuple[list[Any], dict[str, int], dict[str, str]]:
    """Outputs of updates with 8 and 4 microbatches of varied lengths, each after a forward-only pass."""
    passes = install(None)
    if job.schedule:  # as the package verl does with VERL_USE_EXTERNAL_MODULES
        os.environ["PIPELINE_SCHEDULE"] = job.schedule
        import_module("megatron.schedules.installed")
    torch.distributed.init_process_group("gloo")
    engine = MegatronEngineWithLMHead(
        _model(folder),
        _parallel(job.pipeline, job.chunks),
        McoreOptimizerConfig(lr=1e-3, lr_decay_steps=10, clip_grad=job.clip),
        CheckpointConfig(),
    )
    model_parallel_cuda_manual_seed(7)  # as verl does where it sees a GPU
    engine.initialize()
    outputs = []
    for update in range(_UPDATES):
        with engine.eval_mode():
            outputs.append(_plain(engine.forward_backward_batch(_batch(update, 1), None, forward_only=True)))
        with engine.train_mode():
            engine.optimizer_zero_grad()
            outputs.append(_plain(engine.forward_backward_batch(_batch(update, 1 + update % 2), _loss)))
            gradients = gradient_digests(engine.module)
            engine.optimizer_step()
    return outputs, dict(passes), gradients


def _model(folder: Path) -> Any:
    """What the engine reads of verl's HFModelConfig, which wants a tokenizer too."""
    hf_config = Qwen2Config.from_pretrained(folder)
    return SimpleNamespace(
        hf_config=hf_config,
        local_path=str(folder),
        trust_remote_code=False,
        model_type="language_model",
        share_embeddings_and_output_weights=False,
        mtp=MtpConfig(),
        architectures=hf_config.architectures,
        tokenizer=SimpleNamespace(pad_token_id=0),
        get_processor=lambda: None,
        lora={},
        get=lambda name, default=None: default,
    )


def _parallel(pipeline: int, chunks: int) -> Any:
    return McoreEngineConfig(
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        use_distributed_optimizer=False,
        override_transformer_config={
            "attention_backend": "fused",
            "gradient_accumulation_fusion": False,
            "masked_softmax_fusion": False,
            "bias_dropout_fusion": False,
            "persist_layer_norm": False,
            "apply_rope_fusion": False,
        },
    )


def _batch(update: int, rows: int) -> TensorDict:
    """Rows of different lengths, ``rows`` of them in a microbatch."""
    draw = torch.Generator().manual_seed(update)
    lengths = [5 + (3 * update + 4 * row) % 11 for row in range(_ROWS)]
    tokens = [torch.randint(1, small_qwen.WORDS, (length,), generator=draw) for length in lengths]
    columns = {"input_ids": tokens, "loss_mask": [torch.ones_like(row) for row in tokens]}
    nested = {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in columns.items()}
    batch = TensorDict({**nested, "temperature": torch.ones(_ROWS)}, batch_size=[_ROWS])
    tu.assign_non_tensor(
        batch, use_dynamic_bsz=False, micro_batch_size_per_gpu=rows, pad_mode=DatasetPadMode.NO_PADDING
    )
    return batch


def _loss(model_output: Any, data: Any, dp_group: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    loss = -model_output["log_probs"].values().sum() / data["batch_num_tokens"]
    return loss, {"tokens": [data["input_ids"].offsets()[-1].item()]}


def _plain(output: dict[str, Any]) -> Any:
    """The output in JSON's terms; only the last pipeline rank has one."""
    assert bool(output) == parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    return _numbers(output)


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _numbers(each) for name, each in value.items()}
    return value.values().tolist() if torch.is_tensor(value) else value
