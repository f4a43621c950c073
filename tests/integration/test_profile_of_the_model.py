"""A job's own profile is taken for the model that it was measured on, with what that recomputes, and for no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.schedules.integration.flags.arguments import completed, spec_of
from megatron.schedules.integration.flags.declared import stock_parser
from megatron.schedules.job.checks import check_model
from megatron.schedules.job.job_costs import costs_of
from megatron.schedules.job.measuring import MeasuredIterations, check_folder, measured_iterations
from megatron.schedules.job.values import Measuring
from megatron.schedules.measure.job_profile import JobProfile, Measured, StageProfile
from megatron.schedules.measure.job_profile_json import to_text
from megatron.schedules.measure.profile_facts import Facts
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.kinds import SEEN_BY, Kind, Share
from megatron.schedules.schedule.placement import sequential
from megatron.schedules.utils.errors import PlanError
from tests.integration.results import MODEL

TIMES = {Kind.F: Measured(2, 2, 2), Kind.I: Measured(5, 5, 5), Kind.W: Measured(1, 1, 1)}
JOB = [*MODEL, *"--pipeline-model-parallel-size 2 --pipeline-schedule 1f1b --padded-vocab-size 96".split()]
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()


def costs(path: Path, flags: list[str], **facts: Any) -> Any:
    """What a job with ``flags`` is planned for, after one whose facts were these."""
    measured = Facts(
        "a GPU", layers=8, hidden_size=32, heads=4, sequence_length=16, micro_batch_size=1, tensor_parallel=1
    )
    stages = (StageProfile(4, TIMES, held=1000.0, sizes=dict.fromkeys(SEEN_BY, 0.0) | {Share.WEIGHTS: 500.0}),) * 2
    made = JobProfile(measured._replace(**facts), "1f1b", sequential(2), 4, (3, 4), 1, stages)
    path.write_text(to_text(made))
    args, _ = stock_parser().parse_known_args([*JOB, *flags, "--pipeline-costs", str(path)])
    args.world_size = 2
    spec = completed(spec_of(args), args)
    check_model(spec)
    return costs_of(spec).on(sequential(2), Decisions(layers=(4, 4)))


def test_recompute_while_measuring_is_not_added_twice(tmp_path):
    plain = costs(tmp_path / "c.json", []).times[Kind.I]
    assert plain == pytest.approx((5, 5))
    assert costs(tmp_path / "c.json", FULL, recompute="full").times[Kind.I] == pytest.approx((5, 5))
    assert costs(tmp_path / "c.json", FULL).times[Kind.I] == pytest.approx((7, 7)), "a forward more than was measured"


def test_recompute_after_measuring_holds_less_than_was_measured(tmp_path):
    plain, alike = costs(tmp_path / "c.json", []), costs(tmp_path / "c.json", FULL, recompute="full")
    assert plain.held[Share.FORWARD] == alike.held[Share.FORWARD] == pytest.approx((1, 1))
    # Only the layers' inputs stay after F.
    assert costs(tmp_path / "c.json", FULL).held[Share.FORWARD] == pytest.approx((0.06, 0.06), abs=0.01)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"recompute": "full"}, "--recompute-granularity full, not None"),
        ({"context_parallel": 2}, "--context-parallel-size 2, not 1"),
        ({"sequence_length": 32}, "--seq-length 32, not 16"),
        ({"micro_batch_size": 2}, "--micro-batch-size 2, not 1"),
    ],
)
def test_another_models_profile_is_refused(tmp_path, facts, why):
    with pytest.raises(PlanError, match=f"was measured for another model: {why}; measure this one"):
        costs(tmp_path / "c.json", [], **facts)


def test_only_the_first_node_must_have_the_folder(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "none"
    with pytest.raises(PlanError, match="is no folder; name a folder, there or to be made"):
        check_folder(folder)
    monkeypatch.setenv("GROUP_RANK", "1")
    check_folder(folder)
    found = measured_iterations(Measuring(folder, (2, 4)), None)
    assert found == MeasuredIterations(2, 4, folder / "costs.json", folder)


def test_the_folder_is_made_and_written_before_the_job_starts(tmp_path):
    check_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a").iterdir()) == [tmp_path / "a" / "b"]
    assert not list((tmp_path / "a" / "b").iterdir())
    with pytest.raises(PlanError, match="--pipeline-measure /proc/none: cannot be made and written"):
        check_folder(Path("/proc/none"))
