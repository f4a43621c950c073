"""Each logged iteration says what its pipeline came to, planned and measured, and which stage was slowest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.schedules.integration.log.run_log import Logged
from megatron.schedules.measure.iteration_summary import Iteration
from megatron.schedules.measure.slow_ranks import Slow
from tests.integration.results import MODEL, UNTIED
from tests.integration.server import Megatron

SAID = re.compile(
    r" pipeline bubble: ([\d.]+) % \(planned ([\d.]+) %\) \|( peak activations: [^|]* \|)?"
    r" slowest stage: (\d) \(rank (\d), ([+-]\d+) % over mean, planned ([+-]\d+) %\)"
)
JOB = [*MODEL, *UNTIED, *"--train-iters 5 --log-interval 2 --global-batch-size 4".split()]
JOB += "--pipeline-model-parallel-size 2 --pipeline-schedule v-half".split()


def lines(megatron: Megatron, world: int, *flags: str) -> dict[int, str]:
    """Each iteration's line, of the rank that prints it."""
    outputs = megatron("outputs", world, [*JOB, *flags])
    assert [status for status, _ in outputs] == [0] * world, outputs[-1][1][-3000:]
    assert not any(SAID.search(printed) for _, printed in outputs[:-1])
    return {int(n): line for line in outputs[-1][1].splitlines() for n in re.findall(r" iteration +(\d+)/", line)}


def test_iterations_that_are_logged_say_how_they_went(megatron: Megatron, tmp_path: Path) -> None:
    found = lines(megatron, 4, "--pipeline-measure", str(tmp_path))
    assert list(found) == [1, 2, 4]
    for line in found.values():
        said = SAID.search(line)
        assert said is not None, line
        bubble, planned, peak, stage, rank, _, _ = said.groups()
        assert 0 < float(bubble) < 100
        assert 0 < float(planned) < 100
        assert (int(stage), int(rank)) in ((0, 0), (1, 1), (2, 1), (3, 0))
        assert re.search(r" [\d.]+ MiB, planned [\d.]+ MiB", peak), peak


def test_what_nothing_counted_is_not_said(megatron: Megatron) -> None:
    for line in lines(megatron, 2).values():
        assert " peak activations: planned " in line


@pytest.mark.parametrize(
    ("peak", "planned", "said"),
    [
        (13.2e9, 12.8e9, " peak activations: 12.29 GiB, planned 11.92 GiB |"),
        (1048576, None, " peak activations: 1.00 MiB |"),
        (None, None, ""),
    ],
)
def test_the_words(peak: float | None, planned: float | None, said: str) -> None:
    logged = Logged(Iteration(0.0523, (1.0, 1.0, 1.3)), Iteration(0.049, (1.0, 1.0, 1.0)), peak, planned, 2)
    assert logged.words() == (
        f" pipeline bubble: 5.2 % (planned 4.9 %) |{said} slowest stage: 2 (rank 2, +18 % over mean, planned +0 %) |"
    )
    assert logged.warnings() == []
    assert ("pipeline/peak-activations-gib" in logged.scalars()) == (peak is not None)


def test_a_slow_rank_is_named_in_a_line_of_its_own() -> None:
    once = Iteration(0.1, (1.0, 1.0))
    logged = Logged(once, once, None, None, 0, [Slow(5, 1.312)], "when it was profiled")
    (line,) = logged.warnings()
    assert line == (
        "pipeline schedule: WARNING: pipeline rank 5 takes 1.31 x as long for its passes as when it was profiled"
    )
