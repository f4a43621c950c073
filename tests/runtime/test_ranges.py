"""Profilers see every action of a program under its own name."""

from __future__ import annotations

import itertools

import torch

from megatron.schedules.runtime.engine import run
from megatron.schedules.runtime.recorder import ProfilerRanges
from tests.runtime.test_engine import NoTransport, Recorder, one_rank


def test_a_profile_names_each_action():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(one_rank("0F0 0F1 0I0 0B1 0W0", n=2), Recorder(), NoTransport(), [ProfilerRanges()])
    ours = [event for event in profile.events() if event.name[0].isdigit()]
    assert [event.name for event in ours] == ["0F0", "0F1", "0I0", "0B1", "0W0", "0REDUCE0"]
    assert all(one.time_range.end <= other.time_range.start for one, other in itertools.pairwise(ours))
