"""tools/profile_passes.py: what it refuses, what it leaves to Megatron, and the profile it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    assert parse().layers == 6
    assert parse("--pipeline-model-parallel-size", "2").layers == 3
    assert parse("--pipeline-model-parallel-size", "64").layers == 1
    assert parse("--pipeline-model-parallel-size", "2", "--profile-layers", "5").layers == 5


def test_what_only_a_pipeline_needs_is_not_for_megatron():
    job = "--pipeline-schedule adaptive --pipeline-memory-limit=0.5 --rampup-batch-size 2 2 8 --bf16 --lr 1e-3"
    asked = parse(*job.split(), "--pipeline-model-parallel-size", "2", "--profile-name", "small")
    assert asked.flags[-3:] == ["--bf16", "--lr", "1e-3"]
    assert not {"--pipeline-schedule", "--rampup-batch-size", "8", "--pipeline-model-parallel-size"} & {*asked.flags}
    at = asked.flags.index("--num-layers")
    assert asked.flags[at + 1] == "3", "Megatron builds the chunk alone"
    assert "--num-layers 12" in asked.given and "--rampup-batch-size 2 2 8" in asked.given
    assert "--output" not in asked.given and "small" not in asked.given


def test_several_processes_share_a_tensor_parallel_model():
    assert parse("--tensor-model-parallel-size", "2", "--context-parallel-size", "2", processes=4).layers == 6


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment = alone | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM), *flags]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


def test_a_profile_has_times_and_bytes_of_all_three_parts(tmp_path):
    output = tmp_path / "profile.json"
    job = "--vocab-size 90 --pipeline-model-parallel-size 3 --pipeline-schedule v-half --global-batch-size 24".split()
    done = run("--output", str(output), *SHAPE, *job, "--profile-repetitions", "4")
    assert done.returncode == 0, done.stderr
    assert "chunk: 4 of 4" in done.stderr and str(output) in done.stdout
    found = json.loads(output.read_text())
    assert found["version"] == 1 and found["device"]
    model = {"layers": 12, "hidden_size": 32, "heads": 4, "sequence_length": 16, "vocabulary": 128, "name": None}
    assert found["model"] | model == found["model"]
    assert (found["micro_batch_size"], found["tensor_parallel"], found["context_parallel"]) == (2, 1, 1)
    assert found["dtype"] == "fp32" and set(found["versions"]) == {"torch", "megatron-core"}
    for name in ("chunk", "output_layer", "embedding"):
        for kind in ("forward", "input_grad", "weight_grad"):
            times = found[name][kind]
            assert 0 < times["low"] <= times["median"] <= times["high"] < 60
    chunk, output_layer, embedding = (found[name] for name in ("chunk", "output_layer", "embedding"))
    assert chunk["layers"] == 2
    # The inputs of a layer's four linears, and the gradients of their outputs, in numbers of four bytes.
    tokens, hidden = 2 * 16, 32
    assert chunk["weight_bytes"] == 2 * 4 * tokens * hidden * (1 + 1 + 1 + 4 + 3 + 1 + 4 + 1)
    assert chunk["weight_bytes"] < chunk["activation_bytes"] < 2 * chunk["weight_bytes"]
    # Of a layer that is recomputed only its input is kept.
    assert chunk["input_bytes"] == 2 * 4 * tokens * hidden
    assert 0.2 < chunk["recompute"]["median"] / chunk["forward"]["median"] < 5
    assert set(found["copy_gbps"]) == {"to_host", "from_host", "both_ways"}
    assert all(0.01 < rate < 1000 for rate in found["copy_gbps"].values())
    assert " GB/s to the host" in done.stdout
    # The output layer's weight gradient is part of I.
    assert output_layer["weight_bytes"] == 0 < output_layer["activation_bytes"]
    assert embedding["weight_bytes"] == 0 < embedding["activation_bytes"]


def test_flags_that_megatron_refuses_are_one_line(tmp_path):
    done = run("--output", str(tmp_path / "x.json"), *SHAPE, "--no-such-flag")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "profile_passes.py: error: unrecognized arguments: --no-such-flag"
    assert "usage" not in done.stderr
