"""A weight gradient that is computed in I, behind communication, adds up as it would have in W and holds nothing."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from megatron.schedules.runtime.activation_meter import ActivationMeter
from megatron.schedules.runtime.weight_gradients import WeightGradients
from tests.runtime.gathering_closure import GatheringClosure


class _Settling(GatheringClosure):
    """Gradients that can be computed ahead: what they were told, and what they hold then."""

    settles = True

    def __init__(self, log: list[str], name: str, microbatch: int, *parameters: Tensor) -> None:
        self._log, self._name, self.held = log, name, torch.zeros(10)
        get = partial(log.append, f"get {name}")
        super().__init__((0, microbatch), self._run, get, [self.held], parameters)

    def settled(self, ahead: bool) -> list[Tensor]:
        assert not torch.is_grad_enabled()
        self._log.append(f"{self._name} {'ahead' if ahead else 'waits'}")
        return [] if ahead else [torch.zeros(1)]

    def _run(self) -> list[None]:
        self._log.append(f"run {self._name}")
        return [None] * len(self.parameters)


def test_what_can_compute_ahead_does_so_once_and_holds_nothing_from_then_on():
    log: list[str] = []
    meter = ActivationMeter()
    store = WeightGradients(meter)
    with store.input_gradient(0, 0):
        store.compute_ahead((0, 0))
        store.add(_Settling(log, "a", 0))
        assert meter.current == 40
        store.compute_ahead((0, 0))
        assert meter.current == 0
        store.compute_ahead((0, 0))
        store.add(GatheringClosure((0, 0), lambda: log.append("run b"), lambda: log.append("get b")))
        store.compute_ahead((0, 0))
    assert log == ["a ahead"]
    store.prefetch(0, 0)
    store.run(0, 0)
    assert log[1:] == ["get b", "run a", "run b"], "what has been computed prefetches nothing and hides nothing"


@pytest.mark.parametrize("end", ["the next", "i"])
def test_what_had_nothing_to_hide_behind_waits_and_says_what_it_holds(end: str):
    log: list[str] = []
    meter = ActivationMeter()
    store = WeightGradients(meter)
    with store.input_gradient(0, 0):
        store.add(_Settling(log, "a", 0))
        if end == "the next":
            store.defer((0, 0), lambda: None)
            assert log == ["a waits"]
    assert log == ["a waits"] and meter.current == 4
    store.compute_ahead((0, 0))
    store.run(0, 0)
    assert log == ["a waits", "get a", "run a"] and meter.current == 0


def test_nothing_is_added_to_a_parameter_ahead_of_what_waits_to_be():
    log: list[str] = []
    store, weight = WeightGradients(), torch.nn.Parameter(torch.zeros(1))
    with store.input_gradient(0, 0):
        store.add(_Settling(log, "a", 0, weight))
        store.add(_Settling(log, "b", 0, weight))
        store.compute_ahead((0, 0))
    with store.input_gradient(0, 1):
        store.add(_Settling(log, "c", 1, weight))
        store.compute_ahead((0, 1))
    assert log == ["a waits", "b waits", "c waits"]
    store.run(0, 0)
    store.run(0, 1)
    with store.input_gradient(0, 2):
        store.add(_Settling(log, "d", 2, weight))
        store.compute_ahead((0, 2))
    with store.input_gradient(0, 3):
        store.add(_Settling(log, "e", 3, weight))
        store.compute_ahead((0, 3))
    assert log[-2:] == ["d ahead", "e ahead"], "what was computed adds no more"


def test_what_waits_since_before_anything_could_compute_ahead_is_waited_for_too():
    log: list[str] = []
    store, weight, other = WeightGradients(), torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    with store.input_gradient(0, 0):
        store.defer((0, 0), lambda: [None], parameters=[weight])
    with store.input_gradient(0, 1):
        for name, parameter in (("a", weight), ("b", other)):
            store.add(_Settling(log, name, 1, parameter))
            store.compute_ahead((0, 1))
    assert log == ["a waits", "b ahead"]


def test_a_held_tensor_that_was_written_to_before_it_computes_ahead_is_an_error():
    log: list[str] = []
    store, settling = WeightGradients(), _Settling(log, "a", 4)
    with pytest.raises(RuntimeError, match=r"\(10,\) held for 0W4 was modified"), store.input_gradient(0, 4):
        store.add(settling)
        settling.held.add_(1)
        store.compute_ahead((0, 4))
    assert not log
