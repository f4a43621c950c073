"""Messages of DeepEP and HybridEP: started first, waited for last, by the device alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.schedules.integration.expert_messages import (
    ExpertMessages,
    HybridBuffer,
    MessageWatch,
    reset_stocks_own,
)

ROWS, RECEIVED = torch.zeros(2, 4), torch.zeros(6, 4)


class Library:
    """DeepEP's buffer and HybridEP's, and the device's streams, which note what is asked of them."""

    def __init__(self) -> None:
        self.did: list[str] = []

    def dispatch(self, x: Any, *, handle: Any = None, **named: Any) -> tuple[Any, ...]:
        self.did.append("dispatch")
        return RECEIVED, None, None, [6], "handle", self

    def combine(self, x: Any, handle: Any, **named: Any) -> tuple[Any, ...]:
        self.did.append("combine")
        return RECEIVED, None, self

    def get_dispatch_layout(self, *args: Any) -> str:
        return "layout"

    def current_stream_wait(self) -> None:
        self.did.append("the device waits")

    def dispatch_with_permute(self, *, hidden: Any, **named: Any) -> tuple[Any, ...]:
        self.did.append(f"dispatch {sorted(named)}")
        return RECEIVED, None, None, [6], "handle"

    def combine_with_unpermute(self, *, hidden: Any, **named: Any) -> tuple[Any, ...]:
        self.did.append(f"combine {sorted(named)}")
        return RECEIVED, None

    def run_ahead(self, sent: int) -> None:
        self.did.append(f"weight gradients behind {sent} bytes")


class Stream:
    def __init__(self, name: str, did: list[str]) -> None:
        self.name, self._did = name, did

    def wait_stream(self, other: Stream) -> None:
        self._did.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def library() -> Iterator[Library]:
    found = Library()
    computing = Stream("computing", found.did)

    @contextmanager
    def within(stream: Stream) -> Iterator[None]:
        found.did.append(f"on {stream.name}")
        yield
        found.did.append("on computing")

    streams = {"Stream": lambda priority: Stream("its own", found.did), "stream": within}
    with mock.patch.multiple(torch.cuda, current_stream=lambda: computing, **streams):
        yield found


def test_the_device_waits_for_deep_ep_behind_weight_gradients(library: Library) -> None:
    messages = ExpertMessages()
    with messages.hidden(library.run_ahead):
        buffer = messages.through(library)
        assert buffer.get_dispatch_layout(ROWS) == "layout"
        *results, event = buffer.dispatch(ROWS, handle=None)
        assert results == [RECEIVED, None, None, [6], "handle"] and library.did == ["dispatch"]
        event.current_stream_wait()
        buffer.combine(ROWS, "handle", topk_weights=None)[-1].current_stream_wait()
    behind = ["weight gradients behind 96 bytes", "the device waits"]
    assert library.did == ["dispatch", *behind, "combine", *behind]


@pytest.mark.parametrize("exposes", [False, True])
def test_messages_are_measured_with_weight_gradients_behind_them_or_without(library: Library, exposes: bool) -> None:
    did = library.did

    def message() -> Callable[[], None]:
        did.append("a message starts")
        return lambda: did.append("a mark")

    messages = ExpertMessages()
    with messages.hidden(library.run_ahead, MessageWatch(message, exposes)):
        messages.through(library).dispatch(ROWS, handle=None)[-1].current_stream_wait()
        HybridBuffer(library, messages).combine_with_unpermute(hidden=ROWS, handle="handle")
    behind = ["a message starts", *([] if exposes else ["weight gradients behind 96 bytes"]), "a mark"]
    assert did[: 3 + len(behind)] == ["dispatch", *behind, "the device waits", "a mark"]
    own = [each.replace("96", "32") for each in behind]
    assert did[3 + len(behind) :] == [
        "its own waits for computing",
        *own,
        "on its own",
        "combine ['handle']",
        "on computing",
        "computing waits for its own",
        "a mark",
    ]


def test_hybrid_ep_sends_on_a_stream_of_its_own(library: Library) -> None:
    messages = ExpertMessages()
    buffer = HybridBuffer(library, messages)
    with messages.hidden(library.run_ahead):
        assert buffer.dispatch_with_permute(hidden=ROWS, handle=None)[-1] == "handle"
        assert buffer.combine_with_unpermute(hidden=RECEIVED, handle="handle") == (RECEIVED, None)
        buffer.dispatch_with_permute(hidden=ROWS, handle="handle")
    assert library.did == [
        each
        for call, sent in (("dispatch", 32), ("combine", 96), ("dispatch", 96))
        for each in (
            "its own waits for computing",
            f"weight gradients behind {sent} bytes",
            "on its own",
            f"{call} ['handle']",
            "on computing",
            "computing waits for its own",
        )
    ]


def test_without_hiding_libraries_are_called_as_by_stock(library: Library) -> None:
    messages = ExpertMessages()
    assert messages.through(library) is library
    HybridBuffer(library, messages).combine_with_unpermute(hidden=ROWS, handle="handle")
    assert library.did == ["combine ['handle']"]


def test_stocks_own_hiding_is_reset_and_named() -> None:
    settings = mock.Mock(spec=["delay_wgrad_compute", "other"], delay_wgrad_compute=True, other=True)
    assert reset_stocks_own(settings) == ["delay_wgrad_compute"]
    assert not settings.delay_wgrad_compute and settings.other and reset_stocks_own(settings) == []
