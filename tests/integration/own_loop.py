"""A user's own training loop: Megatron-LM builds its model and optimizer, and the loop itself has no arguments.

Our hooks are in megatron-core alone, as where Megatron-LM's loop is not installed, and our settings are arguments of
``install()``. So plans come from the model's configuration.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.num_microbatches_calculator import get_num_microbatches, update_num_microbatches
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import destroy_rerun_state_machine
from megatron.training import global_vars, training

import megatron.schedules
from megatron.schedules.integration import core_hooks
from megatron.schedules.integration.flags.declared import FLAGS
from tests.integration import stock_script

Schedule = Callable[..., Any]


def run(flags: Sequence[str], seen: dict[str, Any], recorded: Callable[[Schedule], Schedule]) -> None:
    """Trains with ``flags``.

    Args:
        flags: Megatron's flags; ours become arguments of ``install()``.
        seen: gets losses, iterations and loss scales.
        recorded: wraps the function that runs a step.
    """
    names = {FLAGS[name]: name for name in signature(megatron.schedules.install).parameters if name in FLAGS}
    ours = {names[flag]: value for flag, value in pairwise(flags) if flag in names}
    others = [word for before, word in pairwise(("", *flags)) if word not in names and before not in names]
    core_hooks.install(ours)
    loop = _Loop(seen, recorded)
    training.train, training.evaluate_and_print_results = loop.train, loop.evaluate
    sys.argv = ["own_loop.py", *others]
    stock_script.main()


class _Loop:
    """What takes the place of Megatron-LM's loop, once model and optimizer are built."""

    def __init__(self, seen: dict[str, Any], recorded: Callable[[Schedule], Schedule]) -> None:
        self._seen, self._recorded = seen, recorded

    def train(
        self, forward_step: Any, chunks: list[Any], optimizer: Any, scheduler: Any, samples: Any, *others: Any, **_: Any
    ) -> tuple[int, float]:
        """Trains, and returns what Megatron-LM's function does: iterations and arithmetic."""
        with self._without_arguments() as args:
            self._iterate(args, forward_step, chunks, optimizer, scheduler, samples, others[2])
        return args.train_iters, 0.0

    def _iterate(
        self, args: Any, forward_step: Any, chunks: list[Any], optimizer: Any, scheduler: Any, samples: Any, config: Any
    ) -> None:
        destroy_rerun_state_machine()  # which wants to hear of each step
        config.grad_scale_func, config.finalize_model_grads_func = optimizer.scale_loss, finalize_model_grads
        if args.overlap_grad_reduce:
            without = [chunk.no_sync for chunk in chunks]
            config.no_sync_func = without if len(chunks) > 1 else without[0]
        self._step = self._recorded(get_forward_backward_func())
        consumed = 0
        for iteration in range(args.train_iters):
            update_num_microbatches(consumed)
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            microbatches = get_num_microbatches()
            self._seen["losses"] += self._mean(forward_step, samples, chunks, microbatches)
            self._seen["iterations"].append(iteration + 1)
            batch = microbatches * self._rows * parallel_state.get_data_parallel_world_size()
            if optimizer.step()[0]:
                scheduler.step(increment=batch)
            self._seen["loss_scales"].append(float(optimizer.get_loss_scale()))
            consumed += batch
        if args.overlap_param_gather:
            for chunk in chunks:
                chunk.disable_forward_pre_hook()

    def evaluate(self, _: str, forward_step: Any, samples: Any, chunks: list[Any], *others: Any, **more: Any) -> None:
        """Runs forwards alone."""
        for chunk in chunks:
            chunk.eval()
        with self._without_arguments() as args, torch.no_grad():
            microbatches = args.eval_global_batch_size // (self._rows * parallel_state.get_data_parallel_world_size())
            self._seen["evaluations"] += self._mean(forward_step, samples, chunks, microbatches, forward_only=True)

    @contextmanager
    def _without_arguments(self) -> Iterator[Any]:
        """Takes Megatron's arguments away meanwhile, which nothing of ours may need."""
        args, global_vars._GLOBAL_ARGS = global_vars.get_args(), None
        self._rows, self._length = args.micro_batch_size, args.seq_length
        yield args
        global_vars._GLOBAL_ARGS = args

    def _mean(
        self, forward_step: Any, samples: Any, chunks: list[Any], microbatches: int, forward_only: bool = False
    ) -> list[float]:
        """Runs a step. Returns the mean loss of all tokens; nothing on ranks that have no losses."""
        losses = self._step(
            forward_step_func=forward_step,
            data_iterator=samples,
            model=chunks,
            num_microbatches=microbatches,
            seq_length=self._length,
            micro_batch_size=self._rows,
            forward_only=forward_only,
        )
        if not losses:
            return []
        total = torch.stack([each["lm loss"] for each in losses]).sum(dim=0)
        torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        return [float(total[0] / total[1])]
