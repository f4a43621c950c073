"""Transformer Engine's Python without a GPU: imported, named for what it is, and clear about what it lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.schedules.integration.cpu.te_python import CAPABILITY_VARIABLE
from tests.integration.server import ROOT, VERSIONS, Megatron

ENABLED = "from megatron.schedules.integration.cpu import te_python; print(te_python.enable())"


def said(folder: Path, script: str) -> str:
    """What a process prints that finds packages in ``folder`` too."""
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "TORCHDYNAMO_DISABLE": "1"}
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    return found.stdout.strip()


def test_it_says_what_it_is():
    found = said(ROOT / ".venv/transformer_engine" / VERSIONS[0], ENABLED)
    assert found == f"Transformer Engine {VERSIONS[0]}: its own Python, with plain torch in place of its kernels"


def test_one_that_cannot_be_imported_is_left_out_with_the_reason(tmp_path: Path):
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine/__init__.py").write_text("raise OSError('no library')")
    found = said(tmp_path, f"{ENABLED}\ntry: import transformer_engine\nexcept ImportError: print('left out')")
    assert found == "Transformer Engine cannot be used without a GPU here (OSError: no library)\nleft out"


def _call_what_is_missing() -> None:
    import transformer_engine_torch

    from megatron.schedules.integration.cpu.te_types import MissingError

    with pytest.raises(
        MissingError, match=r"^transformer_engine_torch\.thd_out_correction: .* --transformer-impl local$"
    ):
        transformer_engine_torch.thd_out_correction(1, 2, causal=True)


def test_a_function_that_is_missing_is_named(te: Megatron):
    te("in_groups", 1, _call_what_is_missing)


def _kernel(name: str) -> None:
    from tests.integration import te_kernels_alone

    getattr(te_kernels_alone, name)()


@pytest.mark.parametrize(
    ("name", "ranks"), [("whole_attention", 1), ("ring_attention", 2), ("packed_attention", 1), ("fp4_numbers", 1)]
)
def test_kernels_compute_what_they_stand_for(
    te: Megatron, monkeypatch: pytest.MonkeyPatch, name: str, ranks: int
) -> None:
    monkeypatch.setenv(CAPABILITY_VARIABLE, "10.0")
    te("in_groups", ranks, _kernel, name)


def test_nothing_of_it_is_used_where_nobody_put_it_on_the_path(megatron: Megatron):
    assert megatron("in_groups", 1, _whether_it_is_here) == [False]


def _whether_it_is_here() -> bool:
    return "transformer_engine" in sys.modules
