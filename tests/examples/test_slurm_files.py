"""examples/slurm/job.sh reads two files: Megatron's last iteration and its own count of starts that saved nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.shell_scripts import HOSTILE, QUOTED, Checkout

SCRIPT = "examples/slurm/one_node.sbatch"


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.fixture
def tracker(checkout: Checkout) -> Path:
    file = checkout.stubs / "run" / "checkpoints" / "latest_checkpointed_iteration.txt"
    file.parent.mkdir(parents=True)
    return file


@pytest.mark.parametrize(
    ("text", "iteration"), [("80", 80), ("80\n", 80), ("80\r\n", 80), ("0", 0), ("release", 0), ("release\n", 0)]
)
def test_a_job_goes_on_from_what_megatron_writes(checkout: Checkout, tracker: Path, text: str, iteration: int) -> None:
    tracker.write_bytes(text.encode())
    said = checkout.run(SCRIPT).stdout.splitlines()
    assert said[0].endswith(f"job: from iteration {iteration} of 10000 in {checkout.stubs / 'run'}")
    assert f"nothing saved since iteration {iteration}: not queued again" in said[-1]


def test_a_job_that_has_all_iterations_does_nothing(checkout: Checkout, tracker: Path) -> None:
    tracker.write_text("80")
    done = checkout.run(SCRIPT, TRAIN_ITERS=80)
    assert done.returncode == 0
    assert "nothing to do" in done.stdout
    assert checkout.started() == []


BAD = [HOSTILE, "", "\n", "08", "1_000", "released", "-1", "80\n81", "80\0", "80\0" + "0" * 99, "8" * 20, "8" * 9999]


@pytest.mark.parametrize("text", BAD, ids=lambda bad: ascii(bad)[:20])
def test_any_other_iteration_ends_the_job_before_it_starts(checkout: Checkout, tracker: Path, text: str) -> None:
    tracker.write_bytes(text.encode())
    refused = checkout.run(SCRIPT)
    assert (refused.returncode, refused.stdout) == (2, "")
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"job: error: {tracker} holds ")
    assert line.endswith(
        " and not a whole number: write the iteration of the last whole checkpoint there, or remove it to begin anew"
    )
    assert checkout.started() == []


def test_a_job_that_leaves_an_unreadable_iteration_is_not_queued_again(checkout: Checkout, tracker: Path) -> None:
    refused = checkout.run(SCRIPT, STUB_RUNS=f"[ ${{0##*/}} != srun ] || echo '{HOSTILE}' >{tracker}")
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"job: error: {tracker} holds {QUOTED} and not")
    assert [started.split()[:2] for started in checkout.started() if "srun" not in started] == [["scontrol", "show"]]


def test_a_run_that_loses_iterations_is_not_queued_again(checkout: Checkout, tracker: Path) -> None:
    tracker.write_text("80")
    failed = checkout.run(SCRIPT, STUB_RUNS=f"[ ${{0##*/}} != srun ] || echo 40 >{tracker}")
    assert failed.returncode == 1
    assert not any("requeue" in started for started in checkout.started())


@pytest.mark.parametrize("text", [HOSTILE, "", "-1"])
def test_a_count_of_starts_that_is_no_number_ends_the_job(checkout: Checkout, tracker: Path, text: str) -> None:
    count = checkout.stubs / "run" / "fruitless"
    count.write_text(text)
    refused = checkout.run(SCRIPT, SLURM_RESTART_COUNT=1)
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"job: error: {count} holds ")
    assert line.endswith(" and not a whole number: remove it")
    assert checkout.started() == []
