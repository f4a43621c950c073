"""One training job of the real main program in forked ranks, and what tests compare of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from launch import run_ranks
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from megatron.training import training

import pretrain_gpt

MODEL = [
    "--num-layers",
    "8",
    "--hidden-size",
    "32",
    "--num-attention-heads",
    "4",
    "--seq-length",
    "16",
    "--max-position-embeddings",
    "16",
    "--vocab-size",
    "96",
    "--make-vocab-size-divisible-by",
    "16",
    "--tokenizer-type",
    "NullTokenizer",
    "--mock-data",
    "--micro-batch-size",
    "1",
    "--lr",
    "1e-3",
    "--min-lr",
    "1e-4",
    "--distributed-backend",
    "gloo",
    "--transformer-impl",
    "local",
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-bias-dropout-fusion",
    "--no-persist-layer-norm",
    "--attention-dropout",
    "0",
    "--hidden-dropout",
    "0",
    "--num-workers",
    "0",
    "--eval-iters",
    "1",
    "--eval-interval",
    "1000",
    "--log-interval",
    "1",
    "--seed",
    "7",
]
UNTIED = ["--untie-embeddings-and-output-weights"]


class Result(NamedTuple):
    """What one job gave.

    Args:
        losses: the loss of every iteration, as the last rank reports it.
        evaluations: the losses of validation and test.
        gradients: every parameter's main_grad after the first iteration's schedule, by its name in the whole model and
            the ranks that hold it (data, tensor).
        weights: every parameter at the end, named likewise.
        peaks: bytes of activations at most held, by pipeline rank (only where asked for).
    """

    losses: list[float]
    evaluations: list[float]
    gradients: dict[tuple[str, int, int], torch.Tensor]
    weights: dict[tuple[str, int, int], torch.Tensor]
    peaks: list[int]


def train(world: int, flags: Sequence[str], timeout: float = 180.0) -> Result:
    """Run ``pretrain_gpt.py`` with ``flags`` on ``world`` ranks."""
    ranks = run_ranks(world, _rank, list(flags), timeout=timeout)
    gradients, weights = {}, {}
    for rank in ranks:
        gradients.update(rank["gradients"])
        weights.update(rank["weights"])
    return Result(ranks[-1]["losses"], ranks[-1]["evaluations"], gradients, weights, [rank["peak"] for rank in ranks])


def _rank(flags: list[str]) -> dict[str, Any]:
    seen: dict[str, Any] = {"losses": [], "evaluations": [], "gradients": {}, "weights": {}, "peak": 0}
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
    stock_pretrain = pretrain_gpt.pretrain

    def pretrain(*args: Any, **kwargs: Any) -> None:
        choose = training.get_forward_backward_func
        training.get_forward_backward_func = lambda *a, **k: _recorded(choose(*a, **k), seen)
        stock_pretrain(*args, **kwargs)

    pretrain_gpt.pretrain = pretrain


def _recorded(schedule: Any, seen: dict[str, Any]) -> Any:
    def call(*, model: Any, forward_only: bool = False, **rest: Any) -> Any:
        result = schedule(model=model, forward_only=forward_only, **rest)
        if not forward_only:
            if not seen["gradients"]:
                seen["gradients"] = _gradients(model, lambda parameter: parameter.main_grad)
            seen["peak"] = getattr(schedule, "peak_activation_bytes", 0)
        else:
            seen["weights"] = _gradients(model, lambda parameter: parameter.data)
        return result

    return call


def _gradients(model: Any, value: Any) -> dict[tuple[str, int, int], torch.Tensor]:
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
            found[".".join(parts), data, tensor] = value(parameter).clone()
    return found
