"""``--model``: the plan of a real model, whose ends take time."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron.schedules.cli.commands import main
from megatron.schedules.estimate.device_memory import usable
from tests.refused import assert_refused

SIZE = ["--pipeline-size", "4", "--microbatches", "8"]
FLAGS = "--num-layers 16 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --vocab-size 128000\n"


def planned(capsys: pytest.CaptureFixture[str], *flags: str, schedule: str = "v-half") -> dict[str, Any]:
    assert main(["plan", "--schedule", schedule, *SIZE, "--format", "json", *flags]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_large_vocabulary_shows_in_the_bubble(capsys):
    costs = ("--costs", "1,1.1,0.75")
    with_ends, without = planned(capsys, "--model", "Llama-3-8B", *costs), planned(capsys, *costs)
    assert with_ends["figures"]["bubble"] > without["figures"]["bubble"] + 0.05
    assert with_ends["costs"]["output_layer_in_layers"] == pytest.approx(2.35, abs=0.05)
    assert "output_layer_in_layers" not in without["costs"]


def test_without_costs_the_models_own_arithmetic_says_how_long_passes_take(capsys):
    costs = planned(capsys, "--model", "Llama-3-8B")["costs"]
    assert costs["forward"] == 1
    assert (costs["input_grad"], costs["weight_grad"]) == pytest.approx((1.2, 0.82), abs=0.01)


def test_a_model_may_be_a_file_of_megatrons_flags(capsys, tmp_path: Path):
    file = tmp_path / "model.sh"
    file.write_text(FLAGS)
    assert planned(capsys, "--model", str(file))["costs"]["output_layer_in_layers"] > 5


def test_drawings_say_what_they_are_of(capsys):
    assert main(["draw", "--model", "Llama-3-8B", *SIZE]) == 0
    assert "the output layer as long as 2.343 layers" in capsys.readouterr().out


def test_stages_that_training_would_refuse_are_named(capsys):
    sizes = ["--pipeline-size", "4", "--microbatches", "4", "--model"]
    said = "The model's layers do not divide by the stages of {}: give training --pipeline-layers auto or N,N,...\n"
    assert main(["compare", "--schedule", "1f1b", "--schedule", "v-half", *sizes, "Llama-3-8B --num-layers 36"]) == 0
    assert said.format("v-half") in capsys.readouterr().out
    for layers, named in (("36", True), ("40", False)):
        assert main(["plan", "--schedule", "v-half", *sizes, f"Llama-3-8B --num-layers {layers}"]) == 0
        assert (said.format("v-half") in capsys.readouterr().out) == named


@pytest.mark.parametrize(("layers", "chunks"), [("48", [1, 2, 3, 4]), ("36", [1, 3]), ("30", [1, 2, 4])])
def test_chunks_are_those_that_divide_the_layers_as_in_a_job(capsys, monkeypatch, layers: str, chunks: list[int]):
    monkeypatch.setenv("MEGATRON_SCHEDULES_SEARCH_SECONDS", "0.02")
    flags = ["--memory-limit", "1", "--model", f"Llama-3-8B --num-layers {layers}"]
    assert planned(capsys, *flags, schedule="adaptive")["asked"].get("chunk_choices", [1, 2, 4]) == chunks


def test_layers_may_be_placed_for_the_shortest_plan(capsys):
    even, auto = (
        planned(capsys, "--model", "Llama-3-8B", "--layers", how, schedule="1f1b") for how in ("even", "auto")
    )
    assert auto["figures"]["makespan"] < 0.9 * even["figures"]["makespan"]
    assert sum(auto["layers"]) == 32
    written = ",".join(map(str, auto["layers"]))
    again = planned(capsys, "--model", "Llama-3-8B", "--layers", written, schedule="1f1b")
    # As in a job, room for the parameters that come with layers is made where the planner places them.
    assert auto["stage_costs"].pop("standing") != again["stage_costs"].pop("standing", [])
    assert again == auto


@pytest.mark.nightly
def test_auto_chooses_the_layers_unless_the_flag_says_even(capsys, monkeypatch):
    monkeypatch.setenv("MEGATRON_SCHEDULES_SEARCH_SECONDS", "0.1")
    free, even = (
        planned(capsys, "--model", "Llama-3-8B", *flags, schedule="auto") for flags in ((), ("--layers", "even"))
    )
    assert len(set(free["layers"])) > 1 and sum(free["layers"]) == 32
    assert len(set(even["layers"])) == 1
    assert free["figures"]["makespan"] < even["figures"]["makespan"]
    assert main(["plan", "--schedule", "auto", *SIZE, "--model", "Llama-3-8B"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"\nActivation memory: [\d.]+ GiB, within the limit of [\d.]+ GiB; [\d.]+ % of 1F1B's\.\n", said)
    assert re.search(r"\nNot chosen, .*: vocabulary parallelism would make the iteration some \d+ % shorter", said)


def test_a_plan_says_its_layers_in_megatrons_letters(capsys):
    assert main(["plan", "--schedule", "1f1b", *SIZE, "--model", "Llama-3-8B", "--layers", "9,9,8,6"]) == 0
    assert "Layers: Ettttttttt|ttttttttt|tttttttt|ttttttL\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--layers", "auto"],
            "--layers goes with --model, or a profile with the model's ends: what does a layer cost?",
        ),
        (["--model", "9.6B", "--layers", "best"], "--layers 'best' is not a number"),
        (
            ["--model", "9.6B", "--layers", "1.5,2"],
            "--layers '1.5,2' is not a list of whole numbers up to 10000: use even, auto or the layers of each stage",
        ),
        (["--model", "9.6B", "--layers", "8,8,8,8"], "--layers: the stages have 32 layers, and the model 30"),
        (
            ["--model", "9.6B", "--layers", "15,15"],
            "--layers: layers of 2 stages given for sequential (4 ranks x 1 chunk)",
        ),
    ],
)
def test_layers_that_cannot_be_are_refused(capsys, flags: list[str], said: str):
    assert_refused(["plan", "--schedule", "1f1b", *SIZE, *flags], said, capsys)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("Llama-8B", "--model: 'Llama-8B' is neither a model known by name nor a file: did you mean Llama-3-8B?"),
        ("mine.txt", "--model: 'mine.txt' is neither a model known by name nor a file: known are 9.6B, 21B"),
        ("/", "--model: "),
    ],
)
def test_a_model_that_nobody_knows_is_refused(capsys, model: str, said: str):
    assert_refused(["compare", *SIZE, "--model", model], said, capsys)


def test_the_vocabulary_may_be_shared_by_all_ranks(capsys):
    alone, shared = (planned(capsys, "--model", "Llama-3-8B", *flags) for flags in ((), ("--vocabulary-parallel",)))
    assert shared["figures"]["makespan"] < 0.9 * alone["figures"]["makespan"]
    assert not alone["costs"]["shared_vocabulary"]
    assert shared["costs"]["shared_vocabulary"]
    assert {work[:2] for row in shared["order"] for work in row} >= {"7S", "7T", "4S", "4T"}


def test_a_drawing_says_that_it_is_shared(capsys):
    assert main(["draw", "--model", "Llama-3-8B", "--vocabulary-parallel", *SIZE]) == 0
    words = " ".join(re.sub("<[^>]*>", " ", capsys.readouterr().out).split())
    assert "the output layer as long as 2.343 layers, shared by all ranks" in words


def test_what_is_shared_must_be_known(capsys, tmp_path: Path):
    unknown = ["plan", "--schedule", "v-zb", *SIZE, "--vocabulary-parallel"]
    assert_refused(unknown, "--vocabulary-parallel goes with --model", capsys)
    file = tmp_path / "model.sh"
    file.write_text(FLAGS.strip() + " --mtp-num-layers 1\n")
    flags = ["plan", "--schedule", "v-zb", *SIZE, "--model", str(file), "--vocabulary-parallel"]
    assert_refused(flags, "--vocabulary-parallel: the vocabulary cannot be shared with multi-token prediction", capsys)


def compared(capsys: pytest.CaptureFixture[str], *flags: str) -> list[dict[str, Any]]:
    assert main(["compare", *SIZE, "--format", "json", *flags]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.nightly
def test_memory_is_compared_with_a_devices_for_every_schedule(capsys):
    rows = compared(capsys, "--model", "Llama-3-8B", "--device-memory", "84GiB")
    parts = ("weights", "gradients", "optimizer", "activations", "messages")
    for row in rows:
        if "reason" not in row:
            assert sum(row[f"{part}_bytes"] for part in parts) == pytest.approx(row["together_bytes"])
            assert row["fits"] == (row["together_bytes"] <= usable(84 * 2**30))
    fits = {row["schedule"]: row["fits"] for row in rows if "fits" in row}
    assert fits["v-min"] and not fits["zb-2p"]
    assert len(fits) > 8


def test_memory_is_that_of_the_files_parallel_sizes_and_micro_batch(capsys, tmp_path: Path):
    file = tmp_path / "model.sh"
    held = {}
    for flags in ("", "--tensor-model-parallel-size 2", "--micro-batch-size 2", "--global-batch-size 32"):
        file.write_text(f"{FLAGS.strip()} --bf16 --use-distributed-optimizer {flags}\n")
        rows = compared(capsys, "--model", str(file), "--schedule", "1f1b", "--device-memory", "80GiB")
        held[flags] = rows[0]
    plain, tensor, larger, data = held.values()
    # Norms, and biases behind rows, are whole on both ranks.
    assert tensor["weights_bytes"] == pytest.approx(plain["weights_bytes"] / 2, rel=0.01)
    assert larger["activations_bytes"] == pytest.approx(2 * plain["activations_bytes"])
    assert larger["weights_bytes"] == plain["weights_bytes"]
    # 8 microbatches of one sample: 32 samples make four data-parallel ranks.
    assert data["optimizer_bytes"] == pytest.approx(plain["optimizer_bytes"] / 4)
    assert data["activations_bytes"] == plain["activations_bytes"]


def test_microbatches_that_do_not_divide_the_files_batch_are_refused(capsys, tmp_path: Path):
    """Data parallelism follows from them, and with it the optimizer's memory."""
    file = tmp_path / "model.sh"
    file.write_text(f"{FLAGS.strip()} --global-batch-size 36 --micro-batch-size 2\n")
    said = f"--microbatches 8 does not divide the batch of --model {file}, --global-batch-size 36 with "
    assert_refused(["compare", *SIZE, "--model", str(file)], said, capsys)
    assert main(["compare", *SIZE[:2], "--microbatches", "9", "--model", str(file), "--schedule", "1f1b"]) == 0


def test_under_megatrons_own_recompute_memory_is_told_in_bytes_and_the_same_everywhere(capsys, tmp_path: Path):
    """The job's own 1F1B then holds far less than a microbatch for each rank, so parts of that would mislead."""
    file = tmp_path / "model.sh"
    file.write_text(f"{FLAGS.strip()} --bf16 --recompute-granularity full --recompute-method uniform\n")
    asked = ["--model", str(file), "--schedule", "1f1b"]
    for command in ("compare", "plan"):
        assert main([command, *SIZE, *asked]) == 0
        assert "of 1F1B's" not in capsys.readouterr().out
    bare, within = (compared(capsys, *asked, *more)[0] for more in ((), ("--device-memory", "80GiB")))
    assert bare["peak_memory_bytes"] == pytest.approx(within["activations_bytes"])


def test_variables_of_a_script_may_be_exported_and_one_that_nothing_sets_is_named(capsys, monkeypatch, tmp_path: Path):
    file = tmp_path / "model.sh"
    file.write_text(FLAGS.replace("--num-layers 16", "--num-layers $OUR_LAYERS"))
    assert "$OUR_LAYERS" in file.read_text()
    monkeypatch.delenv("OUR_LAYERS", raising=False)
    said = "--num-layers is $OUR_LAYERS, which nothing sets: export it"
    assert_refused(["compare", *SIZE, "--model", str(file)], said, capsys)
    monkeypatch.setenv("OUR_LAYERS", "16")
    assert main(["compare", *SIZE, "--model", str(file), "--schedule", "1f1b"]) == 0


def test_yaml_is_refused_as_what_it_is(capsys, tmp_path: Path):
    file = tmp_path / "model.yaml"
    file.write_text("num_layers: 32\n")
    assert_refused(["compare", *SIZE, "--model", str(file)], f"{file}: YAML is not read", capsys)


def test_a_table_says_what_its_bytes_are_of(capsys):
    model = ["--model", "Llama-3-8B", "--schedule", "v-half"]
    assert main(["compare", *SIZE, *model, "--device-memory", "80 GiB"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0].split()[-7:] == [
        *("weights", "gradients", "optimizer", "activations", "messages", "together", "fits")
    ]
    assert "compared with 80.00 GiB" in text
    assert "micro batch 1, tensor 1, context 1, data 1 parallel, bf16, without distributed optimizer" in text
    assert main(["compare", *SIZE, *model]) == 0
    heads, units, *_ = capsys.readouterr().out.splitlines()
    assert heads.split()[4:8] == "peak memory peak memory".split()
    assert units.split()[:2] == ["microbatches", "GiB"]
    assert main(["compare", *SIZE, "--schedule", "v-half"]) == 0
    assert "GiB" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--device-memory", "80GiB"], "--device-memory compares the bytes of --model, which is missing"),
        (["--model", "9.6B", "--device-memory", "80"], "--device-memory '80' has no unit: write it such as 80GiB"),
        (["--model", "9.6B", "--device-memory", "0GiB"], "--device-memory 0 is not above zero"),
        (
            ["--model", "9.6B", "--device-memory", "80GiB", "--costs", "own.json"],
            "--device-memory compares the bytes of --model, and --costs $.weight_share goes before them: leave one of",
        ),
    ],
)
def test_bytes_that_are_not_known_are_not_compared(capsys, monkeypatch, tmp_path, flags: list[str], said: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.json").write_text('{"version": 3, "weight_share": 0.5}')
    assert_refused(["compare", *SIZE, *flags], said, capsys)
