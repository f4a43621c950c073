"""A loop on megatron-core that verifies its schedule, with all kinds of state that a training call may change."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import numpy
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.utils import get_attr_wrapped_model

from tests.integration.core_loop import LENGTH, ROWS, WORDS, loss, model_of
from tests.integration.forked_ranks import run_ranks
from tests.loops.ours import install

CALLS = 2


def verified_loop(world: int, groups: dict[str, int], settings: dict[str, Any], **options: Any) -> list[Any]:
    """How each rank ends: exit status, what it printed, and how many samples it read.

    Args:
        world: ranks.
        groups: for ``parallel_state.initialize_model_parallel``.
        settings: arguments of ``install``.
        options: of the model, see :func:`.core_loop.model_of`. With ``regularized`` the loss has a term of the last
            linear's weight.
    """
    return run_ranks(world, _loop, groups, settings, options)


def _loop(groups: dict[str, int], settings: dict[str, Any], options: dict[str, Any]) -> tuple[Any, str, int]:
    install(**settings)
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(**groups)
    model_parallel_cuda_manual_seed(1)
    chunks = model_of(**options)
    for chunk in chunks:
        chunk.register_buffer("mean", torch.zeros(()))
        chunk.scale, chunk.calls = torch.ones(()), 0
        for parameter in chunk.parameters():  # of a call before, which did not end an accumulation
            value = torch.full_like(parameter, 0.125)
            if hasattr(parameter, "main_grad"):
                parameter.main_grad.copy_(value)
            else:
                parameter.grad = value
    samples, printed = _Samples(), io.StringIO()
    with redirect_stdout(printed):
        try:
            for _ in range(CALLS):
                get_forward_backward_func()(
                    forward_step_func=partial(_forward_step, regularized=options.get("regularized", False)),
                    data_iterator=[samples for _ in chunks] if len(chunks) > 1 else samples,
                    model=chunks if len(chunks) > 1 else chunks[0],
                    num_microbatches=5,
                    seq_length=LENGTH,
                    micro_batch_size=ROWS,
                )
        except SystemExit as leaving:
            return leaving.code, printed.getvalue(), samples.read
    return None, printed.getvalue(), samples.read


class _Samples(Iterator[dict[str, Any]]):
    """One iterator for all chunks of a rank; the same tokens on each rank, for each chunk in turn."""

    def __init__(self) -> None:
        self.read = 0

    def __next__(self) -> dict[str, Any]:
        self.read += 1
        return {"tokens": torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) * 7 % WORDS, "more": [1.0]}


def _forward_step(data_iterator: Any, model: Any, *, regularized: bool) -> tuple[torch.Tensor, Any]:
    sample = next(data_iterator)
    tokens, more = sample.pop("tokens"), sample["more"]
    drawn = 1 + 0.1 * random.random() + 0.1 * float(numpy.random.rand()) + 0.1 * torch.rand(())
    model.mean.mul_(0.5).add_(drawn)
    model.scale = model.scale * 1.01
    model.calls += 1
    factor = model.mean * model.scale * (1 + 0.01 * model.calls) * more[0]
    more[0] += 1
    mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    output = model(tokens, torch.arange(LENGTH).expand(ROWS, -1), mask, labels=tokens.roll(-1, 1))
    inner = get_attr_wrapped_model(model, "decoder", return_model_obj=True)
    if regularized and inner.post_process:
        output = output + 0.1 * inner.decoder.layers[-1].mlp.linear_fc2.weight.square().mean()
    return output * factor, partial(loss, tokens)
