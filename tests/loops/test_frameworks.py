"""Jobs of Megatron-Bridge, verl and ms-swift train with our schedules as without this package."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.loops.frameworks import FRAMEWORKS, Job, Outcome, UnreachableError, outcomes, site
from tests.loops.loop_calls import CALLS
from tests.tolerances import likely

pytestmark = pytest.mark.nightly

PIPELINES = (2, 4)
SCHEDULES = {"zb-1p": 1, "v-half": 2, "auto": 2}
"""Model chunks that the loop builds for each."""
CLIPPED = {
    schedule: Job(2, chunks, schedule, clip=1.0) for schedule, chunks in ((None, 1), ("zb-1p", 1), ("v-half", 2))
}
SAVED = Job(2, 2, "v-half", checkpoint="v-half")
SAVED_BY_STOCK = Job(2, 1, None, checkpoint="stock")
LOADED = {
    schedule: Job(2, chunks, schedule, checkpoint="v-half")
    for schedule, chunks in (("auto", 2), ("zb-1p", 1), (None, 1))
}
SAVING = {
    "Megatron-Bridge": (SAVED, *LOADED.values()),
    "ms-swift": (SAVED, *LOADED.values(), SAVED_BY_STOCK),
}
OF_THE_INDEX = [name for name in CALLS if name.split()[0] in FRAMEWORKS]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[Job, Outcome]]:
    """All jobs of a framework, run once."""

    def of(name: str) -> dict[Job, Outcome]:
        try:
            site()
        except UnreachableError as error:
            pytest.skip(f"{name} cannot be downloaded: {error}")
        ours = [Job(ranks, SCHEDULES[schedule], schedule) for ranks, schedule in product(PIPELINES, SCHEDULES)]
        jobs = [*(Job(ranks, 1, None) for ranks in PIPELINES), *ours, *CLIPPED.values(), *SAVING.get(name, ())]
        return dict(zip(jobs, outcomes(name, jobs, tmp_path_factory.mktemp(name, numbered=False)), strict=True))

    return cache(of)


def merged(outcome: Outcome) -> dict[str, str]:
    """Returns the gradients of all ranks."""
    return {name: digest for gradients in outcome.gradients for name, digest in gradients.items()}


def close(found: Any, expected: Any, apart: float) -> bool:
    """Returns whether two nested results are equal, numbers within ``apart`` relatively."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(close(found[key], expected[key], apart) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(close(*each, apart) for each in zip(found, expected, strict=True))
    return bool(abs(found - expected) <= apart * abs(expected))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", PIPELINES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_losses_are_those_of_the_same_job_without_us(run: Any, name: str, schedule: str, ranks: int) -> None:
    stock, ours = (run(name)[job] for job in (Job(ranks, 1, None), Job(ranks, SCHEDULES[schedule], schedule)))
    assert not stock.error and not ours.error, stock.error or ours.error
    assert stock.losses[-1] and not any(stock.passes)
    assert all(passes["F"] for passes in ours.passes) and any("W" in passes for passes in ours.passes)
    assert ours.losses == stock.losses
    assert merged(ours) == merged(stock)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("schedule", ["zb-1p", "v-half"])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_clipping_differs_only_by_the_order_of_sums_in_the_norm(run: Any, name: str, schedule: str) -> None:
    stock, ours = (run(name)[CLIPPED[each]] for each in (None, schedule))
    assert not stock.error and not ours.error, stock.error or ours.error
    # A V has other parameters on a rank, and the norm adds up the ranks' norms.
    assert close(ours.losses, stock.losses, 0.0 if schedule == "zb-1p" else likely(100))
    assert ours.losses[-1][0] == stock.losses[-1][0]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("schedule", LOADED)
@pytest.mark.parametrize("name", SAVING)
def test_a_checkpoint_of_a_v_goes_on_under_any_schedule_and_without_us(
    run: Any, name: str, schedule: str | None
) -> None:
    saved, loaded = (run(name)[job] for job in (SAVED, LOADED[schedule]))
    assert not saved.error and not loaded.error, saved.error or loaded.error
    assert merged(loaded) == merged(saved)  # of the third iteration
    assert loaded.losses[-1] and loaded.losses[-1] == saved.losses[-1][-len(loaded.losses[-1]) :]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_swift_exports_from_a_v_the_file_that_it_exports_without_us(
    run: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    ours, stock = (run("ms-swift")[job] for job in (SAVED, SAVED_BY_STOCK))
    assert not ours.error and not stock.error, ours.error or stock.error
    folder = tmp_path_factory.getbasetemp() / "ms-swift"
    files = [folder / job.checkpoint / "checkpoint-2/model.safetensors" for job in (SAVED, SAVED_BY_STOCK)]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_bridges_own_setting_hides_messages_of_experts(tmp_path: Path) -> None:
    """Gradients are not clipped, so losses are equal to the bit."""
    try:
        site()
    except UnreachableError as error:
        pytest.skip(f"Megatron-Bridge cannot be downloaded: {error}")
    stock, ours = outcomes("Megatron-Bridge", [Job(2, 1, None, 2), Job(2, 2, "v-half", 2)], tmp_path)
    assert not stock.error and not ours.error, stock.error or ours.error
    assert stock.losses[-1] and close(ours.losses, stock.losses, 0.0)
    assert all(passes["hidden"] for passes in ours.passes)


@pytest.mark.nightly
@pytest.mark.parametrize("name", OF_THE_INDEX)
def test_the_call_is_what_the_wheel_has(name: str) -> None:
    call = CALLS[name]
    try:
        source = (site() / call.source).read_text()
    except UnreachableError as error:
        pytest.skip(f"{name} cannot be downloaded: {error}")
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and node.lineno == call.line]
    arguments = {frozenset(keyword.arg for keyword in node.keywords) for node in calls}
    assert frozenset(call.arguments) in arguments, arguments
