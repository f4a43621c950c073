"""scripts/train_demo.sh: says first what a figure is worth, and a refusal once; training itself is a stub."""

from __future__ import annotations

import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from megatron.schedules.measure.recorded_run import Recorded
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.report.drawing import saved_timeline
from megatron.schedules.schedule.simulator import simulate
from tests.shell_scripts import ROOT, Checkout

# Trains as $TRAINING says, compares logs in earnest, and has no GPU.
PYTHON = f"""#!/bin/sh
case "$*" in
  *torch.cuda*) exit 1 ;;
  *compare_logs.py*) shift; exec {sys.executable} {ROOT}/scripts/compare_logs.py "$@" ;;
  *emulate_plans.py*) echo "emulated $*" ;;
  *pipeline-schedule*) eval "$TRAINING" ;;
esac
"""
TRAINED = r"""
for name in "$@"; do [ "$last" = --pipeline-schedule ] && schedule=$name; last=$name; done
echo "  seq_length .................... 128"
echo "$TIMELINE" | sed "s/SCHEDULE/$schedule/"
echo " iteration 1/ 1 | elapsed time per iteration (ms): 1000.0 | global batch size: 16 | lm loss: 5.6 |"
"""
REFUSED = """
echo "pretrain_gpt.py: error: --num-layers must be a multiple of 8"
echo "[rank1]: ValueError: the same of another rank"
exit 1
"""
FAILED = """
for rank in 0 1; do echo "[rank$rank]: Traceback (most recent call last):"; echo "[rank$rank]: AssertionError"; done
echo "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "
exit 1
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    found = Checkout(tmp_path)
    found.run("scripts/setup.sh")
    (found.root / ".venv/bin/python").write_text(PYTHON)
    (found.root / "tools").mkdir(exist_ok=True)
    for name in ("demo_corpus.py", "preprocess_data.py"):
        (found.root / "tools" / name).touch()
    (found.root / ".venv/pyvenv.cfg").touch()
    # The set-up is done; its own tests are elsewhere.
    (found.root / "scripts/setup.sh").write_text("#!/bin/bash\n")
    return found


def trained(checkout: Checkout, *arguments: str) -> CompletedProcess[str]:
    """The demo with jobs that succeed, and print where their timelines are as real ones do."""
    request = Request("1f1b", 2, 2)
    schedule = plan(request)
    timeline = simulate(schedule, request.costs_on(schedule.placement))
    line = saved_timeline(Recorded(timeline, timeline, 5, "none"), checkout.stubs / "SCHEDULE")
    return checkout.run("scripts/train_demo.sh", *arguments, TRAINING=TRAINED, TIMELINE=line)


def test_what_a_figure_is_worth_is_said_before_it(checkout: Checkout) -> None:
    done = trained(checkout)
    assert (done.returncode, done.stderr) == (0, "")
    said = [
        "Tokens per second do not compare the schedules",
        "\ntokens per second",
        "This is an emulation, not a measurement of GPUs",
        "\nemulated ",
    ]
    places = [done.stdout.index(text) for text in said]
    assert places == sorted(places)


def test_both_plans_are_emulated_from_what_the_jobs_recorded(checkout: Checkout) -> None:
    done = trained(checkout, "--pipeline-schedule", "v-zb")
    files = [f"{name}={checkout.stubs}/{name}/recorded.json" for name in ("v-zb", "1f1b")]
    assert f"\nemulated scripts/emulate_plans.py {' '.join(files)}\n" in done.stdout


def test_a_demo_too_short_to_be_emulated_says_so(checkout: Checkout) -> None:
    done = checkout.run("scripts/train_demo.sh", TRAINING=TRAINED, TIMELINE="")
    assert "speed is not compared: no iteration was recorded" in done.stdout
    assert "emulated" not in done.stdout


def test_a_refusal_is_printed_once(checkout: Checkout) -> None:
    done = checkout.run("scripts/train_demo.sh", TRAINING=REFUSED)
    assert done.returncode == 1
    assert (done.stdout + done.stderr).count("--num-layers must be a multiple of 8") == 1
    assert "ValueError" not in done.stdout + done.stderr
    assert "demo: error: the training under v-half failed" in done.stderr


def test_an_error_of_all_ranks_is_printed_once(checkout: Checkout) -> None:
    done = checkout.run("scripts/train_demo.sh", TRAINING=FAILED)
    assert done.stderr.splitlines()[0] == "AssertionError"
    assert len(done.stderr.splitlines()) == 2


def test_a_misspelt_schedule_is_refused_before_anything_is_trained(checkout: Checkout) -> None:
    refuse = checkout.root / ".venv/bin/megatron-schedules"
    refuse.write_text("#!/bin/sh\necho 'error: unknown schedule' >&2\nexit 2\n")
    done = checkout.run("scripts/train_demo.sh", "--pipeline-schedule", "v-haf", TRAINING=TRAINED)
    assert (done.returncode, done.stderr) == (2, "error: unknown schedule\n")
    assert "demo: training" not in done.stdout
