"""A job's log says which of the GPU libraries it found; to say so none of them is imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron.schedules.integration.gpu_libraries import LIBRARIES, libraries_line

SITE = {
    "transformer_engine": "transformer_engine-2.9.0",
    "flash_attn": "flash_attn-2.8.1",
    "apex": "apex-0.1",
    "fused_weight_gradient_mlp_cuda": "",
}
NOWHERE = "(docs/getting-started.md)"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of packages, the only one there is."""
    for library in LIBRARIES:
        for name in library.modules:
            monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def install(site: Path, *names: str) -> None:
    """Packages that cannot be imported, and what pip would have noted of them."""
    for name in names:
        (site / name).mkdir()
        (site / name / "__init__.py").write_text("raise ImportError('no GPU')\n")
        distribution, _, version = SITE[name].partition("-")
        if version:
            folder = site / f"{SITE[name]}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")


def test_what_is_there_is_named_with_its_version(site: Path) -> None:
    install(site, *SITE)
    assert libraries_line() == "pipeline schedule: found Transformer Engine 2.9.0, flash-attn 2.8.1, Apex 0.1"


def test_what_is_not_there_is_named_with_where_to_read_on(site: Path) -> None:
    install(site, "transformer_engine", "flash_attn")
    assert libraries_line() == (
        f"pipeline schedule: found Transformer Engine 2.9.0, flash-attn 2.8.1; not found: Apex {NOWHERE}"
    )


def test_with_none_of_them_the_line_says_so(site: Path) -> None:
    assert libraries_line() == (
        f"pipeline schedule: found none of the GPU libraries; not found: Transformer Engine, flash-attn, Apex {NOWHERE}"
    )


def test_apex_without_its_kernels_is_not_found(site: Path) -> None:
    """Nor is the other project that has its name in the package index."""
    install(site, "apex")
    assert "Apex" in libraries_line().partition("not found")[2]


def test_one_that_pip_did_not_install_is_named_without_a_version(site: Path) -> None:
    (site / "transformer_engine").mkdir()
    (site / "transformer_engine" / "__init__.py").touch()
    assert libraries_line().startswith("pipeline schedule: found Transformer Engine; ")


def test_one_in_another_folder_than_pip_installed_is_named_without_a_version(
    site: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, "transformer_engine")
    checkout = tmp_path_factory.mktemp("checkout")
    (checkout / "transformer_engine").mkdir()
    (checkout / "transformer_engine" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(checkout), str(site)])
    assert libraries_line().startswith("pipeline schedule: found Transformer Engine; ")
