"""What the command writes: files whole or as they were, and nothing from a file that a terminal would obey."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.schedules.cli.commands import main
from megatron.schedules.job.plans import JobPlans
from megatron.schedules.measure.recorded_run import to_text
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.model_memory import EndMemory, LayerMemory, ModelMemory
from tests.measure.test_recorded_run import made
from tests.refused import assert_refused
from tests.terminal import on_a_terminal

ROOT = Path(__file__).parents[2]
SIZE = ["--pipeline-size", "4", "--microbatches", "8"]
# One for each form that has a writer of its own.
CALLS = {
    "csv": ["plan", "--schedule", "v-half", *SIZE, "--format", "csv"],
    "text": ["plan", "--schedule", "v-half", *SIZE, "--format", "text"],
    "svg": ["draw", *SIZE, "--format", "svg"],
    "html": ["draw", *SIZE, "--format", "html"],
    "trace": ["draw", *SIZE, "--format", "trace"],
    "markdown": ["compare", *SIZE, "--schedule", "1f1b", "--format", "markdown"],
}
CONTROLS = ["\x1b]0;title\x07", "\x1b[2J", "\x9b31m", "\x00"]
# No control characters, so names may have them, but no text for a terminal either.
EVIL = "\u202egnp.exe\u2028\u2066"


@pytest.fixture(params=[None, "before"], ids=["new", "replaced"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "out"
    if request.param is not None:
        path.write_text(request.param)
    return path


@pytest.mark.parametrize("form", CALLS)
def test_a_file_and_standard_output_get_the_same(form: str, target: Path, capsys: pytest.CaptureFixture[str]):
    assert main(CALLS[form]) == 0
    text = capsys.readouterr().out
    assert main([*CALLS[form], "--output", str(target)]) == 0
    assert target.read_text(encoding="utf-8") == text
    assert [*target.parent.iterdir()] == [target]


@pytest.mark.parametrize("form", CALLS)
def test_a_full_disk_leaves_the_file_as_it_was(form: str, target: Path):
    before = {path.name: path.read_text() for path in target.parent.iterdir()}
    done = subprocess.run(
        [sys.executable, "-m", "megatron.schedules", *CALLS[form], "--output", str(target)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16)),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"--output: cannot write {target}: File too large" in done.stderr
    assert {path.name: path.read_text() for path in target.parent.iterdir()} == before


@pytest.mark.parametrize(("ending", "begins"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("PDF", b"%PDF")])
@pytest.mark.parametrize("command", ["plan", "draw"])
def test_pictures_are_written_by_their_ending(command: str, ending: str, begins: bytes, tmp_path: Path):
    path = tmp_path / f"picture.{ending}"
    assert main([command, "--schedule", "v-half", *SIZE, "--output", str(path)]) == 0
    assert path.read_bytes().startswith(begins)
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(("ending", "begins"), [("svg", b"<svg"), ("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_a_comparison_can_be_drawn(ending: str, begins: bytes, tmp_path: Path):
    path = tmp_path / f"compared.{ending}"
    assert main(["compare", *SIZE, "--output", str(path)]) == 0
    assert path.read_bytes().startswith(begins)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "--schedule", "v-half"], "3 microbatches (1.50 GiB)"),
        (["draw"], "3 microbatches (1.50 GiB, 75.0 % of 1F1B"),
        (["plan", "--schedule", "v-half", "--format", "html"], "3 microbatches (1.50 GiB)"),
        (["compare"], "GiB"),
    ],
)
def test_memory_is_in_gib_too_where_the_costs_know_the_model(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert main([*arguments, *SIZE]) == 0
    assert said not in capsys.readouterr().out
    eight_layers = ModelMemory((LayerMemory(2.0**28, 2.0**28, 0.0),) * 8, 0.0, EndMemory(), EndMemory())
    monkeypatch.setattr(JobPlans, "microbatch_bytes", eight_layers.of_rank(4))
    assert main([*arguments, *SIZE]) == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("of", ["plans", "run"])
def test_draw_draws_text_on_a_terminal_and_svg_in_a_pipe(of: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "run.json").write_text(to_text(made(Costs.of(2, 1, 1))))
    arguments = ["draw", *(SIZE if of == "plans" else ["--recorded", str(tmp_path / "run.json")])]
    shown = on_a_terminal(arguments)
    assert "<svg" not in shown and "rank 0" in shown and "V-Half" in shown and "bubble" in shown
    assert on_a_terminal([*arguments, "--format", "svg"]).startswith("<svg")
    assert on_a_terminal([*arguments, "--output", str(tmp_path / "a.html")]) == ""
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("<svg")


def test_a_picture_goes_to_a_pipe_but_not_to_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    arguments = ["draw", *SIZE, "--format", "png"]
    command = [sys.executable, "-m", "megatron.schedules", *arguments]
    assert subprocess.run(command, capture_output=True, cwd=ROOT, check=True).stdout.startswith(b"\x89PNG")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert_refused(arguments, "a picture is no text for a terminal; --output names a file", capsys)


def test_without_the_library_a_picture_is_refused_before_anything_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("megatron.schedules.job.plans.JobPlans", None)
    for command in (["plan", "--schedule", "v-half"], ["draw"]):
        said = "png takes the library typst, which is not installed: pip install 'typst"
        assert_refused([*command, *SIZE, "--output", str(tmp_path / "x.png")], said, capsys)
    assert not [*tmp_path.iterdir()]


def test_a_full_device_behind_a_link_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "link").symlink_to("/dev/full")
    said = f"--output: cannot write {tmp_path / 'link'}: No space left on device"
    assert_refused([*CALLS["svg"], "--output", str(tmp_path / "link")], said, capsys)


def test_a_pipe_that_nobody_reads_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    done = subprocess.run(
        [sys.executable, "-m", "megatron.schedules", *CALLS["csv"], "--output", str(tmp_path / "pipe")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,  # it would wait for ever
    )
    assert done.returncode == 2
    assert done.stderr.endswith("pipe: nobody reads from it: start the reader first\n")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_the_shells_pipe_to_a_program_gets_the_plan():
    script = '"$@" --output >(cat >&2)'
    done = subprocess.run(
        ["bash", "-c", f"{script}; wait $!", "bash", sys.executable, "-m", "megatron.schedules", *CALLS["csv"]],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    assert (done.returncode, done.stderr.count("\n")) == (0, 4)


@pytest.mark.parametrize("name", ["half \ud800", "escape \x1b[31m", "zero \0"])
def test_a_name_that_cannot_be_shown_is_refused_in_printable_text(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main([*CALLS["csv"], "--output", str(tmp_path / name / "none")]) == 2
    err = capsys.readouterr().err
    assert "--output: cannot write" in err
    assert err.endswith("\n") and err[:-1].isprintable()


# --- names in files ------------------------------------------------------------------------------------------------


def recording(path: Path, name: str) -> Path:
    """A recording whose device and schedule have this name."""
    data = json.loads(to_text(made(Costs())))
    data |= {"device": name}
    data["schedule"] |= {"name": name}
    path.write_text(json.dumps(data))
    return path


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    return recording(tmp_path / "evil.json", EVIL)


@pytest.mark.parametrize("name", CONTROLS)
def test_control_characters_in_a_recording_are_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["draw", "--recorded", str(recording(tmp_path / "evil.json", name)), "--format", "text"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "--recorded" in err and "$.device" in err
    assert err.endswith("\n") and err[:-1].isprintable()


@pytest.mark.parametrize("form", ["text", "svg", "html", "trace"])
def test_no_name_in_a_recording_is_obeyed(form: str, evil: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["draw", "--recorded", str(evil), "--format", form]
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out").read_text(encoding="utf-8")
    assert main(arguments) == 0
    assert capsys.readouterr().out == text
    assert all(character.isprintable() or character == "\n" for character in text)


def test_no_name_in_a_recording_is_obeyed_by_a_terminal(evil: Path):
    shown = on_a_terminal(["draw", "--recorded", str(evil), "--format", "text"])
    assert "\x1b[" in shown, "colours"
    for part in ("\u202e", "\u2028", "\u2066"):
        assert part not in shown


@pytest.mark.parametrize("cell", ["\x1b[2J", "0F0\x1b[31m", "\u202e0F0", "x" * 100_000])
def test_a_cell_of_a_csv_is_quoted_in_printable_text(cell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "evil.csv"
    path.write_text(cell)
    assert main(["plan", "--schedule", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.endswith("\n") and err[:-1].isprintable()
    assert len(err) < 1000
