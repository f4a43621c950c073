"""Plans from Python: what the documentation shows, what is refused, and how little is imported."""

from __future__ import annotations

import doctest
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import megatron.schedules as ms
from megatron.schedules.cli.commands import main
from megatron.schedules.integration.flags.declared import settings_without_flags, stock_parser
from megatron.schedules.schedule.costs import Costs, HostCopies
from megatron.schedules.schedule.text_forms import from_csv, to_csv

DOCS = Path(__file__).parents[1] / "docs"
SIZE: dict[str, Any] = {"pipeline_size": 4, "microbatches": 8}


def test_the_examples_in_docs_say_what_they_say() -> None:
    text = re.sub(r"^```.*$", "", (DOCS / "python-api.md").read_text(), flags=re.MULTILINE)
    examples = doctest.DocTestParser().get_doctest(text, {}, "python-api.md", None, 0)
    said: list[str] = []
    results = doctest.DocTestRunner().run(examples, out=said.append)
    assert results.attempted > 8
    assert not results.failed, "".join(said)


def test_the_package_brings_neither_the_planner_nor_torch_until_it_is_called() -> None:
    program = (
        "import sys, megatron.schedules as ms; "
        "heavy = {'torch', 'numba', 'numpy', 'click', 'rich', 'msgspec'}; assert not heavy & set(sys.modules); "
        "ms.plan('v-half', pipeline_size=4, microbatches=8); assert not {'torch', 'numba', 'click'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_notebook_completes_the_public_names_and_no_others() -> None:
    assert set(dir(ms)) == {"Plan", "PlanError", "compare", "install", "plan", "without_gpu", "__version__"}
    assert all(hasattr(ms, name) for name in dir(ms))


@pytest.mark.parametrize("missing", ["torch", "megatron.core"])
def test_install_says_what_is_not_installed(missing: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; import megatron.schedules as ms; ms.install()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr.splitlines()[-1] == (
        f"ModuleNotFoundError: training needs {missing}, which is missing: "
        """run pip install ".[megatron]" in this package's folder (docs/getting-started.md)"""
    )


def test_a_plan_is_that_of_the_command_line(capsys) -> None:
    flags = "--pipeline-size 4 --microbatches 8 --model Llama-3-8B --vocabulary-parallel --costs 1,1.1,0.75,0.05"
    assert main(["plan", "--schedule", "v-half", *flags.split(), "--format", "json"]) == 0
    plan = ms.plan("v-half", **SIZE, model="Llama-3-8B", vocabulary_parallel=True, costs=(1, 1.1, 0.75, 0.05))
    assert json.loads(capsys.readouterr().out) == json.loads(plan.to_json())


def test_searched_plans_heed_every_argument() -> None:
    limit = {"memory_limit": 0.8, "search_seconds": 0.02, "model": "Llama-3-8B"}
    plan = ms.plan("adaptive:2", **SIZE, **limit, layers="auto")
    assert plan.decisions.layers is not None and sum(plan.decisions.layers) == 32
    assert plan.schedule.placement.chunks <= 2 and plan.peak_memory <= 0.8 + 1e-9
    low: dict[str, Any] = {"memory_limit": 0.2, "search_seconds": 0.02}
    assert ms.plan("adaptive:2", **SIZE, **low, save_memory="recompute").decisions.recomputed is not None
    copies = {"costs": Costs(copies=HostCopies(0.5)), "save_memory": "offload"}
    assert ms.plan("adaptive:2", **SIZE, **low, **copies).decisions.offloaded is not None
    assert (
        ms.plan("adaptive", **SIZE, memory_limit="60GiB", search_seconds=0.02, model="Llama-3-8B").peak_bytes
        < 60 * 2**30
    )


def test_a_file_of_ones_own_is_planned(tmp_path: Path) -> None:
    text = "0F0,0B0\n1F0,1B0\n"
    (tmp_path / "own.csv").write_text(text)
    plan = ms.plan(tmp_path / "own.csv")  # which says its sizes itself
    assert to_csv(from_csv(text)) == plan.to_csv()
    assert plan.schedule.name == "own.csv"
    assert plan == ms.plan(tmp_path / "own.csv", pipeline_size=2, microbatches=1)


def test_a_notebook_shows_a_drawing_that_is_not_too_large() -> None:
    svg = ms.plan("v-half", **SIZE)._repr_svg_()
    assert svg is not None and svg.startswith("<svg")
    assert ms.plan("1f1b", pipeline_size=16, microbatches=200)._repr_svg_() is None


def test_rows_tell_why_there_is_no_plan() -> None:
    few = ms.compare(["1f1b", "adaptive"], **SIZE, memory_limit=0.01)
    assert [row["schedule"] for row in few] == ["1f1b", "adaptive"]
    assert "is the smallest that works" in str(few[1]["reason"]) and "reason" not in few[0]
    sized = ms.compare(["1f1b"], **SIZE, model="Llama-3-8B")[0]
    assert sized["peak_memory_bytes"] == ms.plan("1f1b", **SIZE, model="Llama-3-8B").peak_bytes
    every = [row["schedule"] for row in ms.compare(**SIZE)]
    assert "v-zb" in every and not {"adaptive", "file", "auto"} & set(every)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"pipeline_size": 1}, "pipeline_size: v-half needs at least 2 pipeline ranks"),
        ({"pipeline_size": 4.5}, "pipeline_size: must be a whole number above zero, not 4.5"),
        ({"microbatches": 0}, "microbatches: must be a whole number above zero, not 0"),
        ({"memory_limit": "half"}, "memory_limit 'half' is neither a fraction such as 0.5 nor such as 20GiB"),
        ({"memory_limit": 0.5}, "memory_limit goes with schedule adaptive or auto, not v-half"),
        ({"costs": (1, 2)}, "costs"),
        ({"costs": (1, 2, -1)}, "costs"),
        ({"costs": "none.json"}, "costs: cannot read none.json"),
        ({"layers": "auto"}, "layers goes with model"),
        ({"model": "Llama-3-8B", "layers": "evn"}, "layers"),
        ({"model": "Llama-3-8B", "layers": (1, 2)}, "layers"),
        ({"vocabulary_parallel": True}, "vocabulary_parallel goes with model"),
        ({"schedule": "v-haff"}, "schedule: unknown schedule 'v-haff': did you mean v-half?"),
        ({"schedule": "adaptive", "memory_limit": 0.01}, "memory_limit: a memory limit of 0.01 of 1F1B's is too small"),
        (
            {"schedule": "adaptive", "memory_limit": 0.5, "save_memory": "offload"},
            "save_memory offload takes the time of copies",
        ),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_with_the_arguments_name(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ms.PlanError) as caught:
        ms.plan(**{"schedule": "v-half", **SIZE, **arguments})
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_an_argument_that_does_not_exist_is_an_error_of_type() -> None:
    with pytest.raises(TypeError, match="there is no argument 'memory'"):
        ms.plan("v-half", **SIZE, memory=1)  # type: ignore[call-arg]
    with pytest.raises(ms.PlanError, match="microbatches is missing: give the number of microbatches in an iteration"):
        ms.compare(pipeline_size=4)


def test_flags_go_before_arguments_of_install_and_arguments_before_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in {"SCHEDULE": "v-min", "MEMORY_LIMIT": "50%", "REPLAN": "0", "LAYERS": ""}.items():
        monkeypatch.setenv(f"PIPELINE_{variable}", value)
    settings = settings_without_flags({"schedule": "auto", "memory_limit": None, "replan": True, "plan_lengths": False})
    assert settings == {"pipeline_schedule": "auto", "pipeline_memory_limit": "50%", "pipeline_replan": True}
    parser = stock_parser()
    parser.set_defaults(**settings)
    args = parser.parse_args(["--pipeline-schedule", "v-half"])
    assert (args.pipeline_schedule, args.pipeline_memory_limit) == ("v-half", "50%")
    assert args.pipeline_replan and not args.pipeline_plan_lengths


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        ({"schedule": "v-halff"}, {}, "unknown schedule 'v-halff': did you mean v-half?"),
        ({"schedule": "nope"}, {}, ", v-zb, adaptive, FILE.csv\n"),
        ({}, {"PIPELINE_SCHEDULE": "nope"}, ", v-zb, adaptive, FILE.csv\n"),
        ({"schedule": "adaptive"}, {}, "--pipeline-memory-limit is missing: "),
        ({}, {"PIPELINE_SCHEDULE": "zb-1p", "PIPELINE_MEMORY_LIMIT": "0.5"}, "--pipeline-memory-limit goes with "),
        ({}, {"PIPELINE_SCHEDULE": "zb-1p", "PIPELINE_REPLAN": "yes"}, "$PIPELINE_REPLAN must be 1 or 0, not 'yes'"),
        ({"memory_limit": 0.5}, {}, "--pipeline-memory-limit goes with --pipeline-schedule "),
    ],
)
def test_install_refuses_wrong_settings_before_it_imports_megatron(
    arguments: dict[str, Any], variables: dict[str, str], said: str
) -> None:
    program = (
        f"import sys; sys.argv = ['loop.py', '--lr', 'x']; import megatron.schedules as ms; ms.install(**{arguments})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | variables, timeout=120, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("loop.py: error: ") and said in done.stderr and done.stderr.count("\n") == 1
