"""tools/profile_passes.py: what it refuses, what it leaves to Megatron, and the profile it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import astuple

from megatron.schedules.measure.cost_file import read_profile
from megatron.schedules.measure.profile_facts import Facts
from megatron.schedules.schedule.kinds import Kind, Share
from tools import profile_passes

PROGRAM = Path(profile_passes.__file__)
SHAPE = "--num-layers 12 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2".split()


def parse(*flags: str, processes: int = 1, output: str = "profile.json") -> profile_passes.Planned:
    return profile_passes.parse(["--output", output, *SHAPE, *flags], processes)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            ["--output", "x.json"],
            "--num-layers, --hidden-size, --num-attention-heads, --seq-length, --micro-batch-size",
        ),
        (SHAPE, "--output"),
        (["--output", "x.json", *SHAPE, "--hybrid-layer-pattern", "*Z"], "has 'Z', which is no layer"),
        (["--output", "x.json", *SHAPE, "--hybrid-layer-pattern", "*E"], "has experts (E): give --num-experts"),
        (["--output", "x.json", *SHAPE, "--hybrid-layer-pattern", "*-/*-"], "multi-token prediction is not measured"),
        (["--output", "x.json", *SHAPE, "--mtp-num-layers", "1"], "multi-token prediction is not measured here"),
        (["--output", "x.json", *SHAPE, "--profile-layers", "0"], "--profile-layers must be at least 1, not 0"),
        (["--output", "x.json", *SHAPE, "--profile-repetitions", "0"], "--profile-repetitions must be at least 1"),
        (
            ["--output", "x.json", *SHAPE, "--tensor-model-parallel-size", "0"],
            "--tensor-model-parallel-size must be at least 1, not 0",
        ),
        (
            ["--output", "x.json", *SHAPE, "--hidden-size", "9" * 20],
            f"--hidden-size must be 10000000 or less, not {'9' * 20}",
        ),
        (["--output", "x.json", *SHAPE, "--num-layers", "-1"], "--num-layers must be at least 1, not -1"),
        (["--output", "no/folder/x.json", *SHAPE], "no/folder/x.json cannot be written"),
        (["--output", ".", *SHAPE], "--output . cannot be written"),
        (["--output", "\x1b[2J/x.json", *SHAPE], r"--output \x1b[2J/x.json cannot be written: there is no folder"),
        (["--output", "x.json", *SHAPE, "--tensor-model-parallel-size", "2"], "torchrun --nproc-per-node 2"),
        (["--output", "x.json", *SHAPE, "--hidden-size", "many"], "--hidden-size"),
    ],
)
def test_bad_requests_are_one_line(capsys, monkeypatch, tmp_path, flags, says):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        profile_passes.parse(flags, 1)
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert says in printed and printed.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_chunk_is_by_default_one_of_two_a_rank():
    assert parse().chunks == {"GPT": 6}
    assert parse("--pipeline-model-parallel-size", "2").chunks == {"GPT": 3}
    assert parse("--pipeline-model-parallel-size", "64").chunks == {"GPT": 1}
    assert parse("--pipeline-model-parallel-size", "2", "--profile-layers", "5").chunks == {"GPT": 5}


def test_a_hybrid_model_has_a_chunk_of_each_kind_of_layer():
    asked = parse("--hybrid-layer-pattern=M-M-|*EM-*E", "--num-experts", "4", "--pipeline-model-parallel-size", "1")
    assert asked.chunks == {"M": 2, "-": 2, "*": 1, "E": 1} and asked.patterns == ["MM", "--", "*", "E"]
    assert "".join(asked.letters) == "M-M-*EM-*E"
    at = asked.flags.index("--hybrid-layer-pattern")
    assert asked.flags[at + 1] == "M-*E" and "--num-layers" not in asked.flags
    assert asked.flags[-2:] == ["--num-experts", "4"]


def test_what_only_a_pipeline_needs_is_not_for_megatron():
    job = "--pipeline-schedule adaptive --pipeline-memory-limit=0.5 --rampup-batch-size 2 2 8 --bf16 --lr 1e-3"
    asked = parse(*job.split(), "--pipeline-model-parallel-size", "2")
    assert asked.flags[-3:] == ["--bf16", "--lr", "1e-3"]
    assert not {"--pipeline-schedule", "--rampup-batch-size", "8", "--pipeline-model-parallel-size"} & {*asked.flags}
    at = asked.flags.index("--num-layers")
    assert asked.flags[at + 1] == "3", "Megatron builds the chunk alone"


def test_several_processes_share_a_tensor_parallel_model():
    assert parse("--tensor-model-parallel-size", "2", "--context-parallel-size", "2", processes=4).chunks == {"GPT": 6}


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment = alone | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM), *flags]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


@pytest.mark.job
def test_a_profile_is_a_jobs_with_times_and_bytes_of_all_three_parts(tmp_path):
    output = tmp_path / "profile.json"
    job = "--vocab-size 90 --pipeline-model-parallel-size 3 --pipeline-schedule v-half --global-batch-size 24".split()
    done = run("--output", str(output), *SHAPE, *job, "--profile-repetitions", "4")
    assert done.returncode == 0, done.stderr
    assert "chunk: 4 of 4" in done.stderr and str(output) in done.stdout
    found = read_profile(output)
    assert found.facts == Facts(found.facts.device, 12, 32, 4, 16, 2, 1, vocabulary=128, dtype="fp32")
    assert found.facts.device and set(json.loads(output.read_text())["versions"]) == {"torch", "megatron-core"}
    assert found.layers == (0, 12, 0)
    for stage in found.stages:
        assert {Kind.F, Kind.I, Kind.W} <= stage.times.keys()
        for time in stage.times.values():
            assert 0 < time.low <= time.median <= time.high < 60_000
    embedding, layers, output_layer = found.stages
    # The inputs of a layer's four linears, and the gradients of their outputs, in numbers of four bytes.
    tokens, hidden = 2 * 16, 32
    assert layers.sizes[Share.WEIGHTS] == 12 * 4 * tokens * hidden * (1 + 1 + 1 + 4 + 3 + 1 + 4 + 1)
    assert layers.sizes[Share.WEIGHTS] < layers.held < 2 * layers.sizes[Share.WEIGHTS]
    assert found.layer_bytes == pytest.approx(layers.held / 12)
    # Of a layer that is recomputed only its input is kept.
    assert layers.held - layers.sizes[Share.RECOMPUTED] == pytest.approx(12 * 4 * tokens * hidden)
    costs = found.costs(3)
    assert costs.in_shares.layer_input == pytest.approx(12 * 4 * tokens * hidden / layers.held)
    assert 0.2 < costs.layers.recompute_time < 5 and costs.copies.time > 0
    assert costs.layers.forward == pytest.approx(layers.median(Kind.F) / 6)
    assert found.copy_gbps is not None and all(0.01 < rate < 1000 for rate in astuple(found.copy_gbps))
    assert " GB/s to the host" in done.stdout
    # The output layer's weight gradient is part of I.
    assert output_layer.sizes[Share.WEIGHTS] == 0 < output_layer.held
    assert embedding.sizes[Share.WEIGHTS] == 0 < embedding.held


@pytest.mark.nightly
def test_flags_that_megatron_refuses_are_one_line(tmp_path):
    done = run("--output", str(tmp_path / "x.json"), *SHAPE, "--no-such-flag")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "profile_passes.py: error: unrecognized arguments: --no-such-flag"
    assert "usage" not in done.stderr


@pytest.mark.nightly
def test_a_hybrid_model_without_the_library_of_its_layers_is_one_line(tmp_path):
    """Its layers are Transformer Engine's."""
    done = run("--output", str(tmp_path / "x.json"), *SHAPE, "--hybrid-layer-pattern", "*-")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("profile_passes.py: error: --hybrid-layer-pattern: a hybrid model")
    assert list(tmp_path.iterdir()) == []
