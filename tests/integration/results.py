"""What tests ask of a training job and what they get: plain data, importable without Megatron."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import torch

MODEL = """
    --num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
    --vocab-size 96 --make-vocab-size-divisible-by 16 --tokenizer-type NullTokenizer --mock-data
    --micro-batch-size 1 --lr 1e-3 --min-lr 1e-4 --seed 7 --num-workers 0
    --distributed-backend gloo --transformer-impl local --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-bias-dropout-fusion --no-persist-layer-norm
    --attention-dropout 0 --hidden-dropout 0 --eval-iters 1 --eval-interval 1000 --log-interval 1
""".split()
UNTIED = ["--untie-embeddings-and-output-weights"]


def flags_of(parser: argparse.ArgumentParser) -> dict[str, tuple[object, ...]]:
    """How ``parser`` reads each flag: name, values, their type, and what it is without the flag."""
    found: dict[str, tuple[object, ...]] = {}
    for action in parser._actions:
        kind = getattr(action.type, "__name__", None) if action.nargs != 0 else None
        found |= dict.fromkeys(action.option_strings, (action.dest, action.nargs, kind or "str", action.default))
    return found


class Result(NamedTuple):
    """What one job gave.

    Args:
        losses: the loss of every iteration, as the last rank reports it.
        evaluations: the losses of validation and test.
        gradients: every parameter's main_grad after the first iteration's schedule, by its name in the whole model and
            the ranks that hold it (data, tensor).
        weights: every parameter at the end, named likewise.
        peaks: bytes of activations at most held, by pipeline rank (only where asked for).
        shapes: by rank, what it saw of samples that are not plain: rows and length of a varied microbatch, the bounds
            of a packed sample's documents.
        iterations: the number Megatron gives each of the iterations, which goes on counting after a resume.
        loss_scales: what the loss was multiplied by in each of the iterations.
        orders: by rank, the order of the microbatches in each of the iterations that was planned for their lengths.
        passes: kinds of pass that our engine ran; none under stock's own schedule.
    """

    losses: list[float]
    evaluations: list[float]
    gradients: dict[tuple[str, int, int], torch.Tensor]
    weights: dict[tuple[str, int, int], torch.Tensor]
    peaks: list[int]
    shapes: list[set[tuple[int, ...]]]
    iterations: list[int]
    loss_scales: list[float]
    orders: list[list[tuple[int, ...]]]
    passes: set[str]


class Logged(NamedTuple):
    """What Megatron logged of a job.

    Args:
        scalars: every number by its name and iteration, but times.
        gradients: every parameter's main_grad at the first step of the optimizer, by its name in the whole model and
            the ranks that hold it (data, tensor); none where the optimizer shards them.
        weights: every parameter at the end, named likewise.
        graphs: how many of Megatron's functions each rank compiled.
    """

    scalars: dict[tuple[str, int], float]
    gradients: dict[tuple[str, int, int], torch.Tensor]
    weights: dict[tuple[str, int, int], torch.Tensor]
    graphs: list[int]


class Call(NamedTuple):
    """One call of the schedule function: microbatches, whether it only runs forwards, and a seed for its samples."""

    microbatches: int
    forward_only: bool = False
    seed: int = 0


class Done(NamedTuple):
    """What a rank has after a call.

    Args:
        results: what the schedule function returned.
        gradients: by name in the whole model.
        passes: how many of our passes ran, by kind; empty under stock's own schedule.
    """

    results: list[Any]
    gradients: dict[str, torch.Tensor]
    passes: dict[str, int]


class Graphed(NamedTuple):
    """What a rank of a job saw that CUDA graphs have a part of.

    Args:
        losses: of each iteration; on the last rank only.
        gradients: for each iteration a digest of every parameter's main_grad.
        captures: graphs captured.
        replays: for each iteration the graphs replayed.
        evaluations: the losses of each evaluation; on the last rank only.
        waits: where a host would wait for its device in a call of the engine that is captured.
    """

    losses: list[float]
    gradients: list[dict[str, str]]
    captures: int
    replays: list[int]
    evaluations: list[float]
    waits: list[str]
