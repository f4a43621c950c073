"""Measures copies between a device and its host: pinned memory, each way alone, and both ways at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from megatron.schedules.measure.profile_facts import CopyRates
from megatron.schedules.runtime.copies import Copying, copies_on

_SIZE = {"cuda": 2**28, "cpu": 2**24}


def copy_rates(device: torch.device, repetitions: int = 5) -> CopyRates:
    """Returns medians of so many repetitions, after a warm-up, in 10**9 bytes a second.

    Of one process alone: several GPUs may share a link or the host's memory, and then each gets less.
    """
    copies, size = copies_on(device), _SIZE[device.type]
    there, other = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    host, back = (copies.allocate(size) for _ in range(2))
    host.zero_()

    def out() -> Copying:
        return copies.to_host([(there, host)])

    def home() -> Copying:
        return copies.from_host([(back, other)])

    def rate(*begin: Callable[[], Copying]) -> float:
        seconds = [_seconds(device, begin) for _ in range(repetitions + 1)][1:]
        return size / statistics.median(seconds) / 1e9

    return CopyRates(rate(out), rate(home), rate(out, home))


def _seconds(device: torch.device, begin: tuple[Callable[[], Copying], ...]) -> float:
    """Returns the seconds until all of them have ended."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    for copying in [each() for each in begin]:
        copying.wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
