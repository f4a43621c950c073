"""Waits of the host that torch's debug mode reports are counted by place, and other warnings are kept."""

from __future__ import annotations

import warnings
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from megatron.core.timers import Timers

from megatron.schedules.integration.host_waits import host_waits, without_idle_timers


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[int | str]:
    """The modes that torch was set to, the first one before."""
    found: list[int | str] = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: found[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", found.append)
    return found


def wait() -> None:
    warnings.warn("called a synchronizing CUDA operation (Triggered internally)", UserWarning, stacklevel=1)


def test_each_wait_is_counted_at_its_place_and_other_warnings_are_shown(modes: list[int | str]) -> None:
    found: Counter[str] = Counter()
    with pytest.warns(UserWarning, match="something else"), host_waits(found):
        for _ in range(3):
            wait()
        warnings.warn("something else", UserWarning, stacklevel=1)
    assert list(found.values()) == [3] and next(iter(found)).startswith("test_host_waits.py:")
    assert modes == [0, "warn", 0]


def test_the_mode_is_put_back_after_an_error(modes: list[int | str]) -> None:
    with pytest.raises(ZeroDivisionError), host_waits(Counter()):
        _ = 1 / 0
    assert modes == [0, "warn", 0]


@pytest.mark.parametrize("level", [0, 1])
def test_passes_do_not_ask_timers_that_measure_no_pass(level: int) -> None:
    timers = Timers(level, "max")
    config = SimpleNamespace(timers=timers, hidden_size=8)
    assert without_idle_timers(config) == SimpleNamespace(timers=None, hidden_size=8)
    assert config.timers is timers


@pytest.mark.parametrize("timers", [None, Timers(2, "max"), lambda name, log_level: None])
def test_timers_that_may_measure_a_pass_are_asked(timers: object) -> None:
    config = SimpleNamespace(timers=timers)
    assert without_idle_timers(config) is config
