"""Backwards and messages have the spans that Megatron gives them, where it and its library mark any."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
from megatron.core.pipeline_parallel import p2p_communication, schedules

from megatron.schedules.integration.log import spans
from megatron.schedules.programs.program import Action, Op
from megatron.schedules.schedule.kinds import Kind

pytestmark = pytest.mark.pure


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the library has seen; it is installed, and Megatron uses it."""
    seen: list[str] = []

    @contextmanager
    def managed_span(group: str, name: str) -> Iterator[None]:
        seen.append(f"{group}: {name}")
        yield
        seen.append("closed")

    helpers = ModuleType("nemo.lens.helpers")
    helpers.managed_span = managed_span  # type: ignore[attr-defined]
    for module in (ModuleType("nemo"), ModuleType("nemo.lens"), helpers):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(spans, "find_spec", lambda name: name)
    return seen


def test_each_backward_and_each_message_has_one_span(opened: list[str]) -> None:
    (observer,) = spans.spans()
    for op in (Kind.F, Kind.I, Op.SEND_B, Kind.W):
        observer.began(Action(op, 0, 0))
        observer.ended(Action(op, 0, 0))
    backward = ["microbatch: megatron.microbatch.backward", "closed"]
    assert opened == [*backward, "communication: megatron.p2p.send_backward", "closed", *backward]


def test_without_the_library_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "nemo", None)
    assert not spans.spans()


def test_names_and_groups_are_those_of_stock() -> None:
    source = "".join(map(inspect.getsource, (p2p_communication, schedules)))
    marked = re.findall(r"trace_fn\('(\w+)', '([\w.]+)'\)", source)
    if not marked:
        pytest.skip("this Megatron marks no spans")
    assert set(spans.NAMES.values()) == {each for each in marked if each[1] != "megatron.microbatch.forward"}
