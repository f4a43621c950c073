"""ms-swift's own Megatron pre-training command, on a CPU; mcore-bridge builds the model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from swift.megatron.pipelines.train.pretrain import megatron_pretrain_main
from swift.megatron.trainers.base import BaseMegatronTrainer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.loops import small_qwen
from tests.loops.frameworks import Job
from tests.loops.ours import install
from tests.support.weights import gradient_digests

_FLAGS = """
    --model_type qwen2 --template default --check_model false --ddp_backend gloo --micro_batch_size 1
    --global_batch_size 8 --train_iters 3 --eval_iters 1 --eval_steps 2 --split_dataset_ratio 0.25 --lr 1e-3
    --max_length 64 --recompute_granularity none --logging_steps 1 --dataloader_num_workers 0
    --dataset_num_proc 1 --torch_dtype float32 --fp16 false --bf16 false --masked_softmax_fusion false
    --bias_dropout_fusion false --gradient_accumulation_fusion false --cross_entropy_loss_fusion false
    --attention_backend unfused --use_distributed_optimizer false
"""


def prepare(folder: Path) -> None:
    """Writes model, tokenizer, and rows of different lengths."""
    small_qwen.write(folder)
    words = ["<pad>", "<eos>", "a", *map(str, range(120))]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    rows = [" ".join(str((7 * row + 3 * at * at) % 120) for at in range(5 + 3 * row % 11)) for row in range(32)]
    lines = [json.dumps({"messages": [{"role": "assistant", "content": row}]}) for row in rows]
    (folder / "rows.jsonl").write_text("\n".join(lines))


def train(job: Job, folder: Path) -> tuple[list[float], dict[str, int], dict[str, str]]:
    """Losses of three iterations and two evaluations, where they are."""
    passes = install(None)
    losses: list[float] = []
    gradients: dict[str, str] = {}
    log = BaseMegatronTrainer.on_log

    def on_log(self: Any, logs: Any, prefix: str = "") -> None:
        log(self, logs, prefix)
        losses.extend(logs[name] for name in ("loss",) if name in logs)
        gradients.update(gradient_digests(self.wrapped_models))

    BaseMegatronTrainer.on_log = on_log
    flags = f"--model {folder} --dataset {folder}/rows.jsonl {_FLAGS} {_keep(job, folder)}"
    flags += f" --pipeline_model_parallel_size {job.pipeline} --clip_grad {job.clip}"
    if job.schedule:
        plugin = folder / f"{job.schedule}-{os.environ['RANK']}.py"
        plugin.write_text(f"import megatron.schedules\nmegatron.schedules.install(schedule={job.schedule!r})\n")
        flags += f" --external_plugins {plugin}"
    if job.chunks > 1:
        flags += f" --virtual_pipeline_model_parallel_size {job.chunks}"
    megatron_pretrain_main(flags.split())
    return losses, dict(passes), gradients


def _keep(job: Job, folder: Path) -> str:
    """Returns the flags with which ms-swift writes a checkpoint after the second iteration, or starts from it."""
    kept = folder / job.checkpoint / "checkpoint-2"
    if job.checkpoint and not kept.exists():
        return f"--output_dir {kept.parent} --add_version false --save_steps 2"
    BaseMegatronTrainer.save_checkpoint = lambda self: None  # it would save at the end, whatever the flags
    output = f"--output_dir {folder / f'{job.pipeline}-{job.chunks}-{job.schedule}-{job.clip}'}"
    return f"{output} --mcore_model {kept} --finetune false" if job.checkpoint else output
