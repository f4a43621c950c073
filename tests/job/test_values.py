"""The value of each flag, read alike for training and the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.schedules.cli.commands import _program
from megatron.schedules.integration.flags.declared import OURS, add_arguments
from megatron.schedules.job import values
from megatron.schedules.job.flags import COMMAND_LINE, SHARED, TRAINING
from megatron.schedules.job.values import DryRun, Measuring, MemoryLimit, MemorySaving, ScheduleChoice
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.utils.errors import PlanError

GOOD = [
    (values.schedule_choice, "v-half", ScheduleChoice("v-half", "v-half")),
    (values.schedule_choice, "adaptive:3", ScheduleChoice("adaptive:3", "adaptive", 3)),
    (values.schedule_choice, "a/b.CSV", ScheduleChoice("a/b.CSV", "file", file=Path("a/b.CSV"))),
    (values.memory_limit, None, None),
    (values.memory_limit, "0.5", MemoryLimit("0.5", fraction=0.5)),
    (values.memory_limit, "1.5GiB", MemoryLimit("1.5GiB", size=1.5 * 2**30)),
    (values.memory_limit, "50%", MemoryLimit("50%", fraction=0.5)),
    (values.memory_limit, "20GB", MemoryLimit("20GB", size=20e9)),
    (values.memory_limit, "20g", MemoryLimit("20g", size=20 * 2.0**30)),
    (values.dry_run, "x80G", DryRun(device_bytes=80 * 2.0**30)),
    (values.memory_limit, "AUTO", MemoryLimit("AUTO")),
    (values.costs_choice, "1,2,3,0.5", values.CostsChoice("1,2,3,0.5", Costs.of(1, 2, 3, 0.5))),
    (values.costs_choice, "c.json", values.CostsChoice("c.json", file=Path("c.json"))),
    (values.layers_choice, None, None),
    (values.layers_choice, "even", "even"),
    (values.layers_choice, "auto", "auto"),
    (values.layers_choice, "3,4,0", (3, 4, 0)),
    (values.memory_saving, None, MemorySaving()),
    (values.memory_saving, "none", MemorySaving()),
    (values.memory_saving, "recompute", MemorySaving(recompute=True)),
    (values.memory_saving, "offload=25", MemorySaving(offload=True, gbps=25)),
    (values.memory_saving, "both", MemorySaving(recompute=True, offload=True)),
    (values.measuring, "out", Measuring(Path("out"))),
    (values.measuring, "a:b:3-8", Measuring(Path("a:b"), (3, 8))),
    (values.dry_run, None, None),
    (values.dry_run, "", DryRun()),
    (values.dry_run, "64", DryRun(64)),
    (values.dry_run, "64x80GiB", DryRun(64, 80 * 2.0**30)),
    (values.dry_run, "x80GB", DryRun(device_bytes=80e9)),
]


@pytest.mark.parametrize(("read", "text", "found"), GOOD)
def test_a_value_is_read(read: Callable[..., Any], text: str | None, found: Any):
    assert read("--flag", text) == found


BAD = [
    (values.schedule_choice, "adaptive:", "--flag adaptive: '' is not a whole number"),
    (values.schedule_choice, "v-half:2", "--flag v-half:2: v-half has 2 chunks a rank; leave out :2"),
    (values.schedule_choice, "file", "name the CSV itself, such as --flag mine.csv"),
    (values.schedule_choice, "1f1b:3", "--flag 1f1b:3: 1f1b has 1 chunk a rank; leave out :3"),
    (values.memory_limit, "50", "--flag 50 is 50 times 1F1B's activation memory"),
    (values.memory_limit, "0GiB", "--flag '0GiB' is neither a fraction such as 0.5 nor such as 20GiB, nor auto"),
    (values.memory_limit, "1e308GiB", "is neither a fraction"),
    (values.costs_choice, "1,2", "or name a FILE.json"),
    (values.layers_choice, "1.5,2", "is not a list of whole numbers up to 10000: use even, auto or the layers of each"),
    (values.layers_choice, "3,-1", "is not a list of whole numbers"),
    (values.memory_saving, "", "--flag '' is unknown: use none, recompute, offload"),
    (values.memory_saving, "offload=", "--flag offload= '' is not a number"),
    (values.memory_saving, "both=0", "--flag both= 0 is not above zero"),
    (values.measuring, "", "--flag '' names no folder"),
    (values.measuring, "out:8-3", "out:8-3 has no iteration that is timed"),
    (values.dry_run, "x", "--flag x '' has no unit"),
    (values.dry_run, "0x80GiB", "--flag 0 is too small"),
]


@pytest.mark.parametrize(("read", "text", "said"), BAD)
def test_a_value_that_is_none_is_refused_with_its_flag(read: Callable[..., Any], text: str, said: str):
    with pytest.raises(PlanError) as refused:
        read("--flag", text)
    assert str(refused.value).startswith("--flag") and said in str(refused.value)


def test_training_has_ten_flags_and_the_command_line_the_first_six_of_them():
    group = add_arguments(argparse.ArgumentParser(add_help=False))
    training = {action.option_strings[0]: action for action in group._actions}
    assert list(training) == [f"{TRAINING}schedule", *OURS] and len(training) == 11
    for command in _program.commands.values():
        ours = {option.opts[0]: option for option in command.params}
        for word, (metavar, _) in SHARED.items():
            option = ours[f"{COMMAND_LINE}{word}"]
            assert (option.metavar or "") == (training[f"{TRAINING}{word}"].metavar or "") == metavar  # type: ignore[attr-defined]
