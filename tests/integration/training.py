"""One training job of the real main program in forked ranks, and what tests compare of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pretrain_gpt  # noqa: E402 - its import turns the CPU stand-in on, once for all forked ranks
import torch  # noqa: E402
from launch import run_ranks  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset  # noqa: E402
from megatron.core.utils import get_attr_wrapped_model, get_model_config  # noqa: E402
from megatron.training import arguments, training  # noqa: E402

MODEL = (
    "--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--vocab-size 96 --tokenizer-type NullTokenizer --mock-data --micro-batch-size 1 --lr 1e-3 --min-lr 1e-4 "
    "--distributed-backend gloo --transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-bias-dropout-fusion --no-persist-layer-norm --attention-dropout 0 --hidden-dropout 0 --num-workers 0 "
    "--eval-iters 1 --eval-interval 1000 --log-interval 1 --seed 7"
).split()
UNTIED = ["--untie-embeddings-and-output-weights"]


class Result(NamedTuple):
    """What one job gave.

    Args:
        losses: the loss of every iteration, as the last rank reports it.
        evaluations: the losses of validation and test.
        gradients: every parameter's main_grad after the first iteration's schedule, by its name in the whole model and
            the ranks that hold it (data, tensor).
        peaks: bytes of activations at most held, by pipeline rank (only where asked for).
    """

    losses: list[float]
    evaluations: list[float]
    gradients: dict[tuple[str, int, int], torch.Tensor]
    peaks: list[int]


def train(world: int, flags: Sequence[str], timeout: float = 180.0) -> Result:
    """Run ``pretrain_gpt.py`` with ``flags`` on ``world`` ranks."""
    ranks = run_ranks(world, _rank, list(flags), timeout=timeout)
    gradients: dict[tuple[str, int, int], torch.Tensor] = {}
    for rank in ranks:
        gradients.update(rank["gradients"])
    return Result(ranks[-1]["losses"], ranks[-1]["evaluations"], gradients, [rank["peak"] for rank in ranks])


def _rank(flags: list[str]) -> dict[str, Any]:
    seen: dict[str, Any] = {"losses": [], "evaluations": [], "gradients": {}, "peak": 0}
    torch.set_num_threads(1)
    sys.argv = ["pretrain_gpt.py", *flags]
    _listen(seen)
    pretrain_gpt.main()
    return seen


def _listen(seen: dict[str, Any]) -> None:
    """Look over stock's shoulder: at the schedule's result, the training log, and evaluation."""
    stock_log, stock_evaluate = training.training_log, training.evaluate

    def training_log(loss_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if "lm loss" in loss_dict:
            seen["losses"].append(float(loss_dict["lm loss"]))
        return stock_log(loss_dict, *args, **kwargs)

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        result = stock_evaluate(*args, **kwargs)
        if result[0] and "lm loss" in result[0]:
            seen["evaluations"].append(float(result[0]["lm loss"]))
        return result

    training.training_log, training.evaluate = training_log, evaluate
    stock_finalize = training.finalize_model_grads

    def finalize(model: Any, *args: Any, **kwargs: Any) -> None:
        stock_finalize(model, *args, **kwargs)
        if not seen["gradients"]:
            seen["gradients"] = _gradients(model)

    training.finalize_model_grads = finalize


def _gradients(model: Any) -> dict[tuple[str, int, int], torch.Tensor]:
    found = {}
    data, tensor = parallel_state.get_data_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    for chunk in model:
        config = get_model_config(chunk)
        inner = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
        offset = get_transformer_layer_offset(config, vp_stage=getattr(inner, "vp_stage", None))
        for name, parameter in inner.named_parameters():
            parts = name.split(".")
            if "layers" in parts:
                at = parts.index("layers") + 1
                parts[at] = str(int(parts[at]) + offset)
            found[".".join(parts), data, tensor] = parameter.main_grad.clone()
    return found
