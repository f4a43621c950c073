"""Megatron-Bridge's own smallest recipe and its own ``pretrain``, on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.bridge.recipes.gpt.h100.vanilla_gpt import vanilla_gpt_pretrain_1gpu_h100_bf16_config
from megatron.bridge.training import eval as evaluation
from megatron.bridge.training import train as loop
from megatron.bridge.training.comm_overlap import CommOverlapConfig
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain

from tests.loops.frameworks import Job
from tests.loops.ours import install
from tests.support.weights import gradient_digests, named_parameters, start_equal


def prepare(folder: Path) -> None:
    """Data are mock data, and weights are drawn by name."""


def train(job: Job, folder: Path) -> tuple[list[float], dict[str, int], dict[str, str]]:
    """Losses of three iterations, of evaluations after the second and at the end, and of the test, where they are."""
    passes = install(job.schedule)
    losses: list[float] = []
    gradients: dict[str, str] = {}
    _listen(losses, gradients)
    config = _small(vanilla_gpt_pretrain_1gpu_h100_bf16_config())
    config.model.pipeline_model_parallel_size = job.pipeline
    config.model.virtual_pipeline_model_parallel_size = job.chunks if job.chunks > 1 else None
    config.optimizer.clip_grad = job.clip
    if job.experts:
        _with_experts(config, job.experts, hidden=job.schedule is not None)
    if job.checkpoint:
        _keep(config.checkpoint, folder / job.checkpoint)
    config.model.register_pre_wrap_hook(_start_equal)
    pretrain(config, forward_step)
    return losses, dict(passes), gradients


def _keep(checkpoint: Any, folder: Path) -> None:
    """Writes a checkpoint after the second iteration, or starts from it."""
    if (folder / "iter_0000002").exists():
        checkpoint.load, checkpoint.ckpt_step = str(folder), 2
    else:
        checkpoint.save, checkpoint.save_interval = str(folder), 2
    checkpoint.async_save = False


def _small(config: Any) -> Any:
    """The recipe with a small model, in fp32, of so few iterations that nothing is saved."""
    model, train = config.model, config.train
    config.env_vars = {}
    model.num_layers, model.hidden_size, model.ffn_hidden_size, model.num_attention_heads = 8, 32, 64, 4
    model.vocab_size = config.tokenizer.vocab_size = 96
    model.seq_length = config.dataset.seq_length = 16
    model.attention_dropout = model.hidden_dropout = 0.0
    model.gradient_accumulation_fusion = model.masked_softmax_fusion = model.bias_dropout_fusion = False
    model.cross_entropy_loss_fusion = model.persist_layer_norm = False
    model.pipeline_dtype = config.optimizer.params_dtype = torch.float32
    config.mixed_precision = None
    config.optimizer.bf16 = config.optimizer.use_distributed_optimizer = False
    config.optimizer.lr = 1e-3
    config.scheduler.lr_warmup_iters = 0
    train.train_iters, train.global_batch_size, train.micro_batch_size = 3, 8, 1
    config.validation.eval_interval, config.validation.eval_iters = 2, 1
    config.checkpoint.save = config.logger.tensorboard_dir = None
    config.logger.log_interval = 1
    config.dist.distributed_backend = "gloo"
    config.dataset.num_workers = 0
    return config


def _with_experts(config: Any, ranks: int, *, hidden: bool) -> None:
    """A mixture of experts over ``ranks`` in bf16, as Bridge asks for where their messages are to be hidden."""
    model = config.model
    model.num_moe_experts, model.moe_router_topk, model.moe_ffn_hidden_size = 4, 2, 64
    model.expert_model_parallel_size, model.moe_token_dispatcher_type = ranks, "alltoall"
    model.add_bias_linear = False
    config.mixed_precision = "bf16_mixed"
    if hidden:
        config.comm_overlap = CommOverlapConfig(
            tp_comm_overlap=False, overlap_moe_expert_parallel_comm=True, delay_wgrad_compute=True
        )


def _start_equal(model: list[Any]) -> list[Any]:
    """Draws weights by name; the output layer's are the embedding's, as the recipe ties them."""
    start_equal(model)
    for name, parameter in named_parameters(model):
        if name.endswith(("word_embeddings.weight", "output_layer.weight")):
            torch.nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(7))
    return model


def _listen(losses: list[float], gradients: dict[str, str]) -> None:
    step, evaluate = loop.train_step, evaluation.evaluate

    def train_step(*args: Any, **named: Any) -> Any:
        result = step(*args, **named)
        losses.extend(float(loss) for loss in result[0].values())
        gradients.update(gradient_digests(args[2]))
        return result

    def evaluated(*args: Any, **named: Any) -> Any:
        result = evaluate(*args, **named)
        losses.extend(float(loss) for loss in (result[0] or {}).values())
        return result

    loop.train_step, evaluation.evaluate = train_step, evaluated
    for part in (loop, evaluation):  # from modelopt, which is not here; nothing is distilled
        part.get_tensor_shapes_adjust_fn_for_distillation = lambda *args, **named: None
