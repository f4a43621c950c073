"""As a pass begins, what the W right after it gathers first is on its way already."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import split_helpers as helpers
import torch
from recorded_collectives import recorded
from torch import Tensor

from megatron.schedules.programs.lowering import lower
from megatron.schedules.programs.program import Action, Op, Program
from megatron.schedules.runtime.engine import run
from megatron.schedules.runtime.weight_gradients import WeightGradients
from megatron.schedules.schedule.kinds import Pass
from megatron.schedules.schedule.placement import sequential
from megatron.schedules.schedule.schedule import Schedule

ORDERS = ("0F0 0I0 0W0 0F1 0I1 0W1", "0F0 0I0 0F1 0W0 0I1 0W1", "0F0 0F1 0I0 0I1 0W0 0W1", "0F0 0I0 0F1 0B1 0W0")


class _Log:
    """An observer that writes the passes between what else is logged."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def began(self, action: Action) -> None:
        self._log.append(str(action))

    def arrived(self) -> None: ...

    def ended(self, action: Action) -> None: ...


class _NoTransport:
    def finish(self) -> None: ...


def _program(order: str) -> Program:
    (program,) = lower(Schedule("by hand", sequential(1), 2, (tuple(map(Pass.parse, order.split())),)))
    return program


def _trained(order: str, log: list[str]) -> list[Tensor]:
    """The gradients of two microbatches, under the engine."""
    from megatron.schedules.integration.linears.local import split_linears
    from megatron.schedules.integration.model_binding import Deferred
    from megatron.schedules.integration.model_stages import MegatronStages
    from megatron.schedules.integration.schedule_call import ScheduleCall

    model, store = helpers.block(sequence_parallel=True), WeightGradients()
    model.set_input_tensor = lambda _: None
    split_linears(model, store)
    inputs = iter(helpers.inputs_of(2, torch.float32, True))

    def step(data: Any, chunk: Any) -> tuple[Tensor, Any]:
        return chunk(next(data)), lambda y: (helpers.loss(y), {})

    call = ScheduleCall(step, [inputs], 2, False, None, 1)
    config = helpers.config(sequence_parallel=True, calculate_per_token_loss=False)
    stages = MegatronStages(_program(order), [model], config, call, Deferred(store), lambda _: nullcontext())
    with recorded(log):
        run(_program(order), stages, _NoTransport(), [_Log(log)])  # type: ignore[arg-type]
    store.assert_empty()
    return [parameter.grad for parameter in model.parameters()]


def _ahead() -> list[list[str]]:
    on_cpu = torch.zeros

    def zeros(*shape: Any, device: Any = None, **settings: Any) -> Tensor:
        return on_cpu(*shape, **settings)

    logs: list[list[str]] = [[] for _ in ORDERS]
    with mock.patch.object(torch, "zeros", zeros):
        gradients = list(map(_trained, ORDERS, logs))
        with mock.patch.object(WeightGradients, "prefetch"):
            gradients += [_trained(order, []) for order in ORDERS]
    for found in gradients[1:]:
        helpers.assert_same("gradient", found, gradients[0])
    return logs


def _told(log: Sequence[str]) -> list[str]:
    """The passes, and what is gathered for a W, whoever then waits for it."""
    return [entry for entry in log if entry == "gather" or (entry[0].isdigit() and "REDUCE" not in entry)]


def test_the_first_gather_of_a_w_is_behind_the_pass_before():
    logs, others = helpers.run_ranks(2, _ahead, tensor_model_parallel_size=2)
    assert logs == others, "all ranks of a tensor-parallel group gather at the same point"
    found = list(map(_told, logs))
    rest = ["gather"] * 2
    assert found == [
        ["0F0", "0I0", "0W0", "gather", *rest, "0F1", "0I1", "0W1", "gather", *rest],
        ["0F0", "0I0", "0F1", "gather", "0W0", *rest, "0I1", "0W1", "gather", *rest],
        # The last of the first W's is the first of the second's.
        ["0F0", "0F1", "0I0", "0I1", "gather", "0W0", *rest, "gather", "0W1", *rest],
        # Stock's whole backward gathers for the weight gradients of its column-parallel linears, without waiting.
        ["0F0", "0I0", "0F1", "0B1", "gather", *rest, "0W0", *rest],
    ]


def _weights_after(order: str) -> list[tuple[int, int] | None]:
    program = _program(order)
    passes = [action for action in program.actions if action.op is not Op.REDUCE]
    return [program.weights_after.get(action[:3]) for action in passes]


def test_a_w_right_after_its_own_i_has_nothing_to_gather_before():
    assert _weights_after("0F0 0F1 0I0 0W0 0B1") == [None] * 5
    assert _weights_after("0F0 0F1 0I0 0I1 0W0 0W1") == [None, None, None, (0, 0), (0, 1), None]
