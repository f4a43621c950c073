"""The documentation site builds without a warning and without torch, and its sections name every page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.schedules import __all__
from megatron.schedules.schedule.kinds import Kind

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {
    path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*") if path.suffix in (".md", ".rst")
}
# Pages outside the site that link to it, or that it links to.
OTHERS = sorted([*ROOT.glob("*.md"), *(ROOT / "examples").rglob("*.md")])
# Folders whose messages, help and docstrings name pages.
NAMING = ("megatron/schedules", "benchmarks", "tools", "scripts", "tests", "pyproject.toml", "pretrain_gpt.py")


def build(target: Path, python_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = (str(python_path), os.environ.get("PYTHONPATH", ""))
    return subprocess.run(
        ["bash", "scripts/build_docs.sh", target],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment},
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built where torch cannot be imported, as on a machine that has none."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "no").mkdir()
    (folder / "no" / "torch.py").write_text("raise ImportError('the documentation needs no torch')\n")
    built = build(folder / "html", folder / "no", DOCS_SOURCE_URL="https://code.example/main")
    assert (built.returncode, built.stdout, built.stderr) == (0, "", "")
    return folder / "html"


def toctrees(page: str) -> list[str]:
    """The pages that the toctrees of ``page`` name, as paths in docs/."""
    blocks = re.findall(r"```\{toctree\}\n((?:.|\n)*?)```", (DOCS / f"{page}.md").read_text())
    lines = [line for block in blocks for line in block.splitlines() if line and not line.startswith(":")]
    named = [re.sub(r".*<(.*)>", r"\1", line) for line in lines]  # with or without a title of its own
    return [os.path.normpath(os.path.join(os.path.dirname(page), name)) for name in named]


def anchors(page: Path) -> set[str]:
    """Names of the headings of ``page``, as a code host makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_every_page_is_built_without_a_warning(site: Path) -> None:
    assert {page for page in PAGES if not (site / f"{page}.html").is_file()} == set()


def test_every_page_is_named_once_by_a_section() -> None:
    named = toctrees("index") + toctrees("notes/index")
    assert sorted(named) == sorted(PAGES - {"index"})


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_links_to_files_of_the_repository_lead_to_the_repository(site: Path) -> None:
    """On a code host they are relative, ../megatron/...; no file is copied for them."""
    page = (site / "architecture.html").read_text()
    assert 'href="https://code.example/main/megatron/schedules/schedule/kinds.py"' in page
    assert not re.search(r'href="[^":]*\.\./(megatron|tests|examples)/', page)
    assert not list(site.rglob("_downloads/*/*.py"))


@pytest.mark.nightly
def test_a_link_to_a_file_that_is_gone_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "scripts").mkdir()
    for name in ("docs/conf.py", "scripts/build_docs.sh", "scripts/_start.sh"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "docs" / "index.md").write_text("# Page\n\n[gone](../megatron/gone.py)\n")
    built = subprocess.run(
        ["bash", "scripts/build_docs.sh"],
        cwd=tmp_path,
        env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert built.returncode == 1
    assert "docs/index.md:3: WARNING: link to a file that does not exist: " in built.stderr


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_api_reference_documents_the_public_names_and_no_others(site: Path) -> None:
    page = (site / "python-api.html").read_text()
    documented = re.findall(r'id="megatron\.schedules\.(\w+)"', page)
    assert sorted(documented) == sorted(__all__)
    costs = "megatron.schedules.schedule.costs.Costs"  # which plan() takes
    assert f'id="{costs}"' in page and not re.search(r'id="megatron\.schedules\.\w+\.\w+\.', page.replace(costs, ""))


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_of_pages_outside_the_site_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", path.read_text()):
        name, _, anchor = link.partition("#")
        page = path.parent / name if name else path
        assert page.exists(), link
        assert not anchor or anchor in anchors(page), link


def test_pages_that_messages_and_docstrings_name_are_there() -> None:
    files = [
        file for name in NAMING for file in ((ROOT / name).rglob("*") if (ROOT / name).is_dir() else [ROOT / name])
    ]
    named = {
        page
        for file in files
        if file.suffix in (".py", ".sh", ".toml")
        for page in re.findall(r"\bdocs/([\w-]+\.md)\b", file.read_text())
    }
    assert len(named) > 10
    assert {page for page in named if not (DOCS / page).is_file()} == set()


def test_the_glossary_explains_every_kind_of_pass() -> None:
    page = (DOCS / "glossary.md").read_text()
    assert [kind for kind in Kind if f"\n| **{kind.value}** | " not in page] == []


@pytest.mark.parametrize(
    "term",
    ["stage", "chunk", "microbatch", "iteration time, makespan", "bubble", "span bubble", "activation memory"],
)
def test_the_glossary_explains_what_tables_are_headed(term: str) -> None:
    assert f"\n| **{term}** | " in (DOCS / "glossary.md").read_text()
