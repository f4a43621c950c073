"""The extras of pyproject.toml: pip can read what they require, and it is what docs/getting-started.md promises."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megatron.schedules.integration.gpu_libraries import LIBRARIES, OLDEST

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "getting-started.md").read_text()
SECTION = re.search(r"\n## GPU libraries\n(.*?)\n## ", PAGE, re.DOTALL)
EXTRAS = {
    extra: [Requirement(written) for written in asked]
    for extra, asked in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].items()
}
# By library: which versions, and how to get it.
ROWS = {
    name: (versions, how)
    for name, versions, how in re.findall(
        r"^\| (Transformer Engine|flash-attn|Apex)\b(?:, )?(.*?) \| (.*?) \| ", SECTION[1] if SECTION else "", re.M
    )
}


def only(extra: str) -> Requirement:
    (requirement,) = EXTRAS[extra]
    return requirement


def floor(requirement: Requirement) -> str:
    (found,) = (each.version for each in requirement.specifier if each.operator == ">=")
    return found


def test_every_library_that_a_job_looks_for_has_its_row() -> None:
    assert list(ROWS) == [library.name for library in LIBRARIES]


@pytest.mark.parametrize("extra", ["te", "flash-attn"])
def test_the_page_names_the_extra(extra: str) -> None:
    assert f'`pip install --no-build-isolation ".[{extra}]"`' in [how for _, how in ROWS.values()]


def test_transformer_engine_comes_for_torch_and_in_a_version_that_can_be_split() -> None:
    asked = only("te")
    assert (asked.name, asked.extras) == ("transformer-engine", {"pytorch"})
    assert floor(asked) == OLDEST
    assert ROWS["Transformer Engine"][0] == f"{OLDEST} or newer"


def test_flash_attn_is_no_newer_than_transformer_engine_accepts() -> None:
    """Most Transformer Engines go on without a word where a version is above their last, by a post-release too."""
    asked = only("flash-attn")
    assert asked.name == "flash-attn"
    assert ROWS["flash-attn"][0] == f"{floor(asked)} to 2.8.3"
    assert asked.specifier.contains("2.8.3")
    assert not any(asked.specifier.contains(later) for later in ("2.8.3.post1", "2.8.4", "3.0"))


def test_apex_is_not_installed_from_the_package_index() -> None:
    """What it has under that name is another project's."""
    assert "apex" not in {requirement.name for asked in EXTRAS.values() for requirement in asked}


def test_training_requires_a_torch_whose_backward_starts_from_an_edge() -> None:
    (torch,) = (requirement for requirement in EXTRAS["megatron"] if requirement.name == "torch")
    assert floor(torch) == "2.7"
    assert "torch 2.7 or newer," in PAGE
    assert "torch 2.7 or newer," in (ROOT / "README.md").read_text()
