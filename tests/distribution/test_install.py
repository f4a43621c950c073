"""The distribution installs beside megatron-core in the one namespace `megatron`, and brings no torch.

Each install goes into an environment of its own, in which a stand-in for the megatron-core wheel already
holds `megatron.core` and `megatron.training`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from megatron.schedules import __version__

ROOT = Path(__file__).parents[2]
STOCK = {"megatron/core/__init__.py": "name = 'core'\n", "megatron/training/__init__.py": "name = 'training'\n"}
PROBE = """
import megatron, megatron.core, megatron.training, megatron.schedules
from megatron.schedules.schedule.kinds import Pass
assert (megatron.core.name, megatron.training.name) == ("core", "training")
assert not hasattr(megatron, "__file__") or megatron.__file__ is None, megatron.__file__
assert str(Pass.parse("5I3")) == "5I3"
print(megatron.schedules.__file__)
"""


def run(*command: object, cwd: Path | None = None) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what an install reads: building writes into the folder that it builds."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("megatron", "benchmarks", "tests", "tools", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The Python of a fresh environment with the stand-in, which borrows our build tools and what the base asks for."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    site = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    for name, text in STOCK.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    for borrowed in ("setuptools*", "_distutils_hack", "click", "msgspec", "rich", "markdown_it", "mdurl", "pygments"):
        for path in Path(sysconfig.get_path("platlib")).glob(borrowed):
            (site / path.name).symlink_to(path)
    return tmp_path / "env" / "bin" / "python"


def pip_install(python: Path, *what: object) -> None:
    flags = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", f"--python={python}", "install", *flags, *what)


def build_wheel(checkout: Path, folder: Path) -> Path:
    flags = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "wheel", *flags, "--wheel-dir", folder, checkout)
    (wheel,) = folder.glob("megatron_schedules-*.whl")
    return wheel


@pytest.mark.nightly
def test_the_wheel_holds_our_branch_of_the_namespace_and_nothing_else(checkout: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(build_wheel(checkout, tmp_path)) as wheel:
        names = set(wheel.namelist())
    ours = {name for name in names if not name.startswith("megatron_schedules-")}
    assert all(name.startswith("megatron/schedules/") for name in ours)
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "megatron").rglob("*.py")}
    assert {name for name in ours if name.endswith(".py")} == sources
    assert "megatron/schedules/py.typed" in ours
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "megatron/schedules/report/page").iterdir()}
    assert pages and pages <= ours
    assert any(name.endswith("/licenses/LICENSE") for name in names)


@pytest.mark.nightly
def test_the_source_distribution_builds_the_same_wheel_and_holds_what_tests_need(
    checkout: Path, tmp_path: Path, python: Path
) -> None:
    program = f"from setuptools.build_meta import build_sdist; print(build_sdist({str(tmp_path)!r}))"
    archive = tmp_path / run(sys.executable, "-c", program, cwd=checkout).splitlines()[-1]
    with tarfile.open(archive) as source:
        source.extractall(tmp_path / "source", filter="data")
    (unpacked,) = (tmp_path / "source").iterdir()
    first, second = (
        zipfile.ZipFile(build_wheel(folder, tmp_path / name)) for folder, name in ((checkout, "a"), (unpacked, "b"))
    )
    assert sorted(first.namelist()) == sorted(second.namelist())
    pip_install(python, tmp_path / "b" / Path(second.filename or "").name)
    assert run(python.parent / "megatron-schedules", "--version", cwd=tmp_path).split()[-1] == __version__


def test_changelog_citation_and_package_name_the_same_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(\d[^]]*)\]", changelog, re.MULTILINE)
    assert released[0] == __version__
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dynamic"] == ["version"]


def test_pre_commit_runs_the_linters_of_the_tests() -> None:
    steps = re.findall(r'^ *step "[^"]*" (\S+)', (ROOT / "scripts" / "run_tests.sh").read_text(), re.MULTILINE)
    hooks = re.findall(r"entry: \.venv/bin/(\S+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert set(hooks) == {*steps, "shellcheck"}


@pytest.mark.nightly
def test_an_ordinary_install_merges_with_megatron_core(checkout: Path, tmp_path: Path, python: Path) -> None:
    pip_install(python, build_wheel(checkout, tmp_path))
    assert str(tmp_path / "env") in run(python, "-c", PROBE, cwd=tmp_path)
    plan = ("plan", "--schedule", "v-half", "--pipeline-size", "2", "--microbatches", "1", "--format", "csv")
    for program in (["megatron-schedules"], ["python", "-m", "megatron.schedules"]):
        rows = run(python.parent / program[0], *program[1:], *plan, cwd=tmp_path).splitlines()
        assert [row.split(",")[0] for row in rows] == ["0F0", "1F0"]


@pytest.mark.nightly
def test_an_editable_install_merges_with_megatron_core(checkout: Path, tmp_path: Path, python: Path) -> None:
    pip_install(python, "--editable", checkout)
    assert str(checkout) in run(python, "-c", PROBE, cwd=tmp_path)
    # By a plain path, not by an import hook, so that tools which look for files find ours too.
    site = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    (path_file,) = site.glob("*megatron_schedules*.pth")
    assert path_file.read_text().strip() == str(checkout)


def test_the_namespace_has_no_init_of_ours() -> None:
    assert not (ROOT / "megatron" / "__init__.py").exists()


def test_the_base_install_asks_for_no_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [name for name in project["dependencies"] if "torch" in name or "megatron" in name]
    assert project["scripts"] == {"megatron-schedules": "megatron.schedules.cli.commands:main"}


def test_the_constraints_are_exact_and_the_installed_megatron_core_is_in_range() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert {"torch", "megatron-core", "numpy", "pytest"} <= set(pins)
    assert pins["megatron-core"].startswith("0.19.")
    metadata = pytest.importorskip("importlib.metadata")
    assert metadata.version("megatron-core").startswith("0.19.")
