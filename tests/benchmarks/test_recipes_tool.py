"""benchmarks/recipes dry-runs a container of Megatron-Bridge's kind and a script of Megatron-LM's; docs/recipes.md."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.recipes.__main__ import as_json, main, read
from benchmarks.recipes.arguments import of_container
from benchmarks.recipes.page import as_page
from megatron.schedules.cli.ending import run
from megatron.schedules.estimate.build import Adapters
from megatron.schedules.estimate.device_memory import RESERVED

ROOT = Path(__file__).parents[2]
JSON, PAGE = ROOT / "docs" / "recipes.json", ROOT / "docs" / "recipes.md"
KNOWN = "llama3_70b_pretrain_64gpu_h100_bf16_config"

# A wheel of Megatron-Bridge in small: it imports what is not installed, and its model is described elsewhere.
BRIDGE = {
    "transformers.py": "class AutoConfig:\n"
    "    from_pretrained = for_model = staticmethod(lambda *args, **kwargs: kwargs)\n",
    "megatron/bridge/__init__.py": "from not_installed.inside import Name, decorate\n\n"
    "@decorate\nclass Uses(Name):\n    pass\n",
    "megatron/bridge/training/__init__.py": "",
    "megatron/bridge/training/mixed_precision.py": "from types import SimpleNamespace\n\n"
    "def get_mixed_precision_config(name):\n    return SimpleNamespace(bf16=name == 'bf16_mixed', fp8=None)\n",
    "megatron/bridge/perf_recipes/__init__.py": "",
    "megatron/bridge/perf_recipes/llama.py": """
from types import SimpleNamespace
from transformers import AutoConfig

def RECIPE():
    model = AutoConfig.from_pretrained("meta-llama/Meta-Llama-3-70B")
    return SimpleNamespace(
        model=SimpleNamespace(
            num_layers=model["num_hidden_layers"], hidden_size=model["hidden_size"],
            ffn_hidden_size=model["intermediate_size"], num_attention_heads=model["num_attention_heads"],
            num_query_groups=model["num_key_value_heads"], vocab_size=model["vocab_size"], kv_channels=128,
            seq_length=8192, gated_linear_unit=True, add_bias_linear=False, normalization="RMSNorm",
            position_embedding_type="rope", attention_dropout=0.0, hidden_dropout=0.0,
            tensor_model_parallel_size=4, pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=5,
            context_parallel_size=2, sequence_parallel=True, cross_entropy_loss_fusion=True,
            cross_entropy_fusion_impl="te",
        ),
        train=SimpleNamespace(micro_batch_size=1, global_batch_size=256),
        ddp=SimpleNamespace(use_distributed_optimizer=True, grad_reduce_in_fp32=False),
        comm_overlap=SimpleNamespace(tp_comm_overlap=True, bucket_size=None),
        mixed_precision="bf16_mixed",
    )

def other_pretrain_8gpu_h100_bf16_config():
    raise FileNotFoundError("a file of the repository")
""".replace("RECIPE", KNOWN),
}
SCRIPT = """
#!/bin/bash
TP=2
MODEL=(--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096
       --vocab-size 32000 --swiglu --disable-bias-linear)
torchrun pretrain_gpt.py ${MODEL[@]} --tensor-model-parallel-size $TP --pipeline-model-parallel-size 4 \\
  --num-layers-per-virtual-pipeline-stage 1 --micro-batch-size 1 --global-batch-size 16 --bf16 \\
  --recompute-granularity selective --cuda-graph-impl local --overlap-moe-expert-parallel-comm
"""


def said(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    command = [sys.executable, "-m", "benchmarks.recipes", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    for name, text in BRIDGE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.nightly
def test_a_script_and_a_recipe_of_bridge_are_dry_run(wheel: Path):
    script = wheel / "train.sh"
    script.write_text(SCRIPT)
    found = said(str(script), KNOWN, "--gpus", "16", "--bridge", str(wheel), "--json", f"{wheel}/a.json", folder=wheel)
    assert found.returncode == 0, found.stderr
    answers = read(wheel / "a.json")
    of_script = answers[str(script)]
    assert (of_script.sizes, of_script.microbatches, of_script.recompute) == ("T2 P4 V2", 8, "core_attn")
    assert list(of_script.left_out) == ["cuda_graph_impl", "overlap_moe_expert_parallel_comm"]
    assert of_script.stock is not None and of_script.stock.schedule == "interleaved-1f1b:2"
    auto, named = of_script.auto, of_script.ours
    assert auto is not None and named is not None and auto.layers == named.layers == "1,1,1,1,1,1,1,1"
    assert auto.time <= named.time
    assert of_script.half is not None and of_script.without is not None
    assert of_script.half.activations < 0.8 * of_script.without.activations
    assert "leave out cuda_graph_impl: does not work with --cuda-graph-impl local: its graphs of layers" in found.stdout
    # The same figures as on the page, which come from Megatron-Bridge itself. What a search finds depends on its time.
    known = answers[KNOWN]
    assert known.auto is not None and known.ours is not None and known.auto.time <= known.ours.time
    assert replace(known, auto=None) == replace(read(JSON)[KNOWN], auto=None)


@pytest.mark.nightly
def test_recipes_that_bridge_cannot_make_are_left_out_and_named(wheel: Path):
    file = shutil.copy(JSON, wheel)
    words = "--bridge", str(wheel), "--json", file, "--page", f"{wheel}/page.md", "--search-seconds", "0"
    found = said(*words, folder=wheel)
    assert found.returncode == 0, found.stderr
    line = "left out: Megatron-Bridge cannot make other_pretrain_8gpu_h100_bf16_config: a file of the repository"
    assert line in found.stderr and not found.stdout
    assert (wheel / "page.md").read_text() == PAGE.read_text()


def test_adapters_of_a_recipe_are_read():
    targets = ["linear_qkv", "*.layers.0.*.linear_fc1"]
    config = SimpleNamespace(peft=SimpleNamespace(dim=16, target_modules=targets))
    assert of_container(config, 8).adapters == Adapters(16, frozenset(("linear_qkv", "linear_fc1")))
    assert of_container(SimpleNamespace(peft=None), 8).adapters is None


def test_every_recipe_of_the_page_has_figures():
    answers = read(JSON).values()
    assert len(answers) == 207 and all(each.gains is not None for each in answers)


@pytest.mark.nightly
def test_of_two_settings_that_exclude_each_other_one_is_left_out(wheel: Path):
    script = wheel / "train.sh"
    experts = "--num-experts 8 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall \\\n"
    both = "  --moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap "
    script.write_text(SCRIPT.replace("--recompute-granularity selective --cuda-graph-impl local", experts + both))
    found = said(str(script), "--gpus", "16", "--search-seconds", "0", "--json", f"{wheel}/a.json")
    assert found.returncode == 0, found.stderr
    assert list(read(wheel / "a.json")[str(script)].left_out) == ["moe_shared_expert_overlap"]


@pytest.mark.nightly
@pytest.mark.parametrize("impl", ["transformer_engine --cuda-graph-modules attn", "full_iteration"])
def test_cuda_graphs_of_layers_and_of_whole_iterations_are_accepted(tmp_path: Path, impl: str):
    script = tmp_path / "train.sh"
    script.write_text(SCRIPT.replace("local --overlap-moe-expert-parallel-comm", impl))
    found = said(str(script), "--gpus", "16", "--search-seconds", "0", "--json", f"{tmp_path}/a.json")
    assert found.returncode == 0, found.stderr
    assert read(tmp_path / "a.json")[str(script)].left_out == {}


def test_what_is_missing_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    script = tmp_path / "train.sh"
    script.write_text(SCRIPT)
    for arguments, line in (
        ([str(script)], f"--gpus is missing: the GPUs of {script}"),
        (["--acceptance"], "--acceptance needs the recipes' plans: name their file with --json"),
        ([KNOWN], f"--bridge is missing: the unpacked wheel of megatron-bridge, which has {KNOWN}"),
        (["--bridge", str(tmp_path)], f"{tmp_path} has no megatron/bridge/perf_recipes"),
    ):
        assert run(main, "recipes", arguments) == 2
        error = capsys.readouterr().err
        assert line in error and error.count("\n") == 1


@pytest.mark.nightly
def test_acceptance_is_asked_again_and_plans_stay(wheel: Path):
    known = read(JSON)[KNOWN]
    file = wheel / "a.json"
    file.write_text(as_json([replace(known, left_out={"another": "of an earlier version"}, microbatches=7)]))
    found = said("--bridge", str(wheel), "--json", str(file), "--acceptance", folder=wheel)
    assert found.returncode == 0, found.stderr
    assert read(file)[KNOWN] == replace(known, microbatches=7)


@pytest.mark.nightly
def test_a_plan_that_recomputes_is_dropped_if_the_rules_have_changed(wheel: Path):
    known = read(JSON)[KNOWN]
    assert known.auto is not None
    before = replace(known, left_out={"another": ""}, auto=replace(known.auto, recomputed=0.5))
    file = wheel / "a.json"
    file.write_text(as_json([before]))
    assert said("--bridge", str(wheel), "--json", str(file), "--acceptance", folder=wheel).returncode == 0
    assert read(file)[KNOWN] == replace(known, auto=None)


def test_auto_is_never_longer_than_the_named_schedule_that_fits():
    searched = [each for each in read(JSON).values() if each.auto is not None]
    assert searched
    for each in searched:
        if each.ours is not None and each.ours.gib <= (1 - RESERVED) * each.gib:
            assert each.auto.time <= each.ours.time + 0.001, each.name  # times are rounded


def test_a_gain_is_over_stock_with_levelled_layers_and_little_where_our_bubble_is_larger():
    timed = [each for each in read(JSON).values() if each.gains is not None]
    assert len(timed) > 20
    for each in timed:
        stock, levelled, gains = each.stock, each.levelled, each.gains
        assert stock is not None and levelled is not None and each.ours is not None and gains is not None
        assert min(stock.time, levelled.time) == 1.0, each.name
        assert gains.whole <= gains.schedule + gains.others + 1e-9
        base = min(stock, levelled, key=lambda planned: planned.time)
        assert gains.whole <= 0.01 or each.ours.bubble <= base.bubble, each.name


def test_the_page_is_written_from_its_results():
    answers = list(read(JSON).values())
    assert PAGE.read_text() == as_page(answers)
    assert JSON.read_text() == as_json(answers)
    rows = re.findall(r"^\| \w+ \| \d+ [A-Z]+\d+ \|", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == len(answers) > 150


@pytest.mark.nightly
def test_rows_are_those_of_the_wheel(tmp_path: Path):
    folder = os.environ.get("MEGATRON_BRIDGE")
    if folder is None:
        pytest.skip("MEGATRON_BRIDGE is the unpacked wheel of megatron-bridge, where transformers is installed")
    names = [
        KNOWN,
        "deepseek_v3_pretrain_256gpu_gb300_fp8cs_config",
        "qwen3_next_80b_a3b_pretrain_64gpu_gb200_bf16_config",
    ]
    found = said("--bridge", folder, "--json", f"{tmp_path}/a.json", *names)
    assert found.returncode == 0, found.stderr
    answers, known = read(tmp_path / "a.json"), read(JSON)
    assert answers == {name: known[name] for name in names}
