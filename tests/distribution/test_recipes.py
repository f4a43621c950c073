"""docs/architecture.md: its recipes, carried out as written on a copy of the package, give what they promise."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.schedules.programs.program import Op
from megatron.schedules.report.palette import HUES
from megatron.schedules.schedule.kinds import KINDS, WHOLES, Kind

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()

# Where a block goes whose first line names a part of a file: after the first match.
PLACES = {
    "planner/registry.py, imports": r"\nfrom megatron\.schedules\.planner\.named import [^\n]*\n",
    "planner/registry.py, _ENTRIES": r"\n_ENTRIES = \{\n",
    "schedule/kinds.py, Kind": r'\n    B = "B"\n',
    "schedule/kinds.py, _SINGLE": r"\n_SINGLE = \{\n",
    "schedule/kinds.py, needs of I": r"\n    Kind\.I: \w+\((?:.|\n)*?Need\(\(Kind\.I, Kind\.B\), At\.NEXT\),\n",
    "schedule/cost_parts.py, times": r"\n        return \{\n(?=            Kind\.F: tuple)",
    "report/palette.py, HUES": r"\nHUES: [^\n]*\{\n",
    "runtime/engine.py, handlers": r"\n    return \{\n(?=        Kind\.F)",
    "runtime/stage_interface.py, Stages": r"\n\Z",
    'tests/integration/features.py, "more"': r'\n    "more": \{\n        "nothing": Feature\(\),\n',
    "integration/hooks.py, before HOOKS": r"\n(?=HOOKS = \(\n)",
    "integration/hooks.py, HOOKS": r"\nHOOKS = \(\n",
    "job/rules.py, _RULES": r"\n_RULES = \(\n",
    "estimate/bounds.py, BOUNDS": r"\nBOUNDS = \{\n",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for part in ("megatron", "tests"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "megatron" / "schedules"


def follow(recipe: str, package: Path) -> None:
    """Do what the section ``recipe`` of the page says, and no more; what comes of it is as ruff would have it."""
    section = re.search(rf"\n## {recipe}\n(.*?)(?=\n## )", PAGE, re.DOTALL)
    assert section is not None
    blocks = re.findall(r"```python\n# (.*?)\n(.*?)```", section[1], re.DOTALL)
    assert blocks
    for where, text in blocks:
        file = where.partition(",")[0]
        path = (package.parents[1] if file.startswith("tests/") else package) / file
        if where not in PLACES:
            assert not path.exists()
            path.write_text(text)
            continue
        found = re.search(PLACES[where], path.read_text())
        assert found is not None, where
        path.write_text(path.read_text()[: found.end()] + text + path.read_text()[found.end() :])
    for command in ("check", "format --check"):
        ruff = [sys.executable, "-m", "ruff", *command.split(), "--no-cache", "--config", str(ROOT / "pyproject.toml")]
        done = subprocess.run([*ruff, package], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr


def python(package: Path, program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=package.parents[1],
        env=os.environ | {"PYTHONPATH": str(package.parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.nightly
def test_a_schedule_is_a_file_and_a_row(package: Path):
    follow("To add a schedule", package)
    said = python(
        package,
        """
from megatron.schedules.cli import commands
from megatron.schedules.planner.registry import Request, every_named, plan, stages
from megatron.schedules.schedule.text_forms import to_csv
print(to_csv(plan(Request("gpipe", 2, 2))), end="")
assert "gpipe" in {timeline.schedule.name for timeline in every_named(Request("", 2, 2))}
assert stages(Request("gpipe", 2, 2)) == 2
commands.main("compare --schedule gpipe --schedule 1f1b --pipeline-size 4 --microbatches 8".split())
""",
    )
    assert said.startswith("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n")
    assert re.search(r"^gpipe +27\.27 % .* 8 +200\.0 %", said, re.MULTILINE)


KIND = """
import io
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.search.list_scheduling import Policy
from megatron.schedules.search.polish import improve
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.simulator import simulate
from megatron.schedules.schedule.text_forms import from_csv, from_json, to_csv, to_json
from megatron.schedules.report.svg import draw_svg
from megatron.schedules.report.text import draw_text
from megatron.schedules.programs.checker import check
from megatron.schedules.runtime import stage_interface
from megatron.schedules.runtime.engine import run
from megatron.schedules.programs.lowering import lower
from megatron.schedules.programs.program import ProgramError
from megatron.schedules.schedule.costs_json import ByKind
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.utils.json_files import decode, encode

text = "0F0,0F1,0G0,0I0,0W0,0G1,0B1\\n1F0,1B0,1F1,1G1,1B1\\n"
schedule = from_csv(text)
assert to_csv(schedule) == text and from_json(to_json(schedule)) == schedule
try:
    from_csv(text.replace("0G1,0B1", "0B1,0G1"))
except PlanError as error:
    print("early:", error)

costs = Costs.of(3, 2, 1)
timeline = simulate(schedule, costs.on(schedule.placement))
ends = dict(zip(map(str, schedule.order[1]), timeline.end[1]))
assert ends["1G1"] - ends["1F1"] == 1.5
assert "G weights gathered" in draw_text([timeline], 100, False).plain
assert "G weights gathered" in draw_svg([timeline])
better = improve(schedule, timeline.costs, [2, 2], [Policy(8)], 5)
assert sorted(better.order[0]) == sorted(schedule.order[0])
assert plan(Request("adaptive", 2, 3, memory_limit=1, search_seconds=0.01)).name

values = {Kind.F: 1.0, Kind.I: 2.0, Kind.W: 3.0, Kind.G: 4.0}
assert decode(encode(ByKind.of(values)), ByKind[float]).values() == values

class Stages(stage_interface.Stages):
    def forward(self, stage, microbatch, activation, *, split, recompute): return activation
    def backward(self, stage, microbatch, gradient): return gradient
    def gather_weights(self, stage, microbatch): print("gathered", stage, microbatch)
    def reduce_gradients(self, stage): ...

one = from_csv("0F0,0F1,0G1,0B1,0B0\\n")
programs = lower(one)
check(lower(schedule))
class Nobody:
    def finish(self): ...
try:
    stage_interface.Stages.gather_weights(Stages(), 0, 0)
except ProgramError as error:
    print("else:", error)
run(programs[0], Stages(), Nobody())
"""


@pytest.mark.nightly
def test_a_kind_of_pass_is_a_row_a_time_a_hue_and_a_handler(package: Path):
    follow("To add a kind of pass", package)
    said = python(package, KIND).splitlines()
    assert said == [
        "early: file: 0B1 stands before 0G1, which it needs",
        "else: these stages gather no weights",
        "gathered 0 1",
    ]


@pytest.mark.nightly
def test_a_feature_is_a_row_a_hook_a_rule_and_bounds(package: Path):
    follow("To follow a feature of Megatron's", package)
    said = python(
        package,
        """
from types import SimpleNamespace
from megatron.schedules.job.rules import refusal
from megatron.schedules.job.spec import Settings
from megatron.schedules.estimate.parallel_sizes import ParallelSizes
from megatron.schedules.job.spec import JobSpec, StockFlags
from megatron.schedules.job.values import ScheduleChoice
from megatron.schedules.planner.registry import Request, plan
settings = Settings(ScheduleChoice("1f1b", "1f1b"))
spec = JobSpec(settings, ParallelSizes(2, 2), stock=StockFlags(frozenset({"use_tp_pp_dp_mapping"})))
print(refusal(spec, plan(Request("1f1b", 2, 4))))
from megatron.schedules.estimate.bounds import check_bounds
from megatron.schedules.utils.errors import PlanError
try:
    check_bounds(SimpleNamespace(moe_router_num_groups=0))
except PlanError as error:
    print(error)
from tests.integration.features import SCHEDULES, alone
assert [case.schedule for case in alone() if case.features == ("no weight decay",)] == [*SCHEDULES]
from megatron.schedules.integration.hooks import HOOKS, install
(hook,) = (hook for hook in HOOKS if hook.name == "num_floating_point_operations")
stock = hook.module.num_floating_point_operations
install()
assert hook.module.num_floating_point_operations.megatron_schedules_stock is stock
""",
    )
    assert said.splitlines() == [
        "does not work with --use-tp-pp-dp-mapping: an example of a rule; leave the flag out",
        "--moe-router-num-groups must be 1 or more, not 0",
    ]


def test_every_kind_has_its_row_its_hue_and_its_handler():
    assert set(KINDS) == set(HUES) == set(Kind)
    assert set(WHOLES.values()) == {kind for kind, row in KINDS.items() if row.parts}
    engine = pytest.importorskip("megatron.schedules.runtime.engine")
    assert set(engine._handlers(None, None, None, None)) == {*Kind, *Op}
