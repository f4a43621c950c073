"""Transformer Engine's Python without a GPU: imported, named for what it is, and clear about what it lacks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.integration.server import ROOT, VERSIONS, Megatron
from tests.support.te_python import CAPABILITY_VARIABLE


@pytest.mark.nightly
def test_it_says_what_it_is():
    path = f"{ROOT / '.venv/transformer_engine' / VERSIONS[0]}{os.pathsep}{ROOT}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "from tests.support.te_python import without_gpu; without_gpu()"],
        env=os.environ | {"PYTHONPATH": path, "TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    last = done.stdout.splitlines()[-1]
    assert last == f"Transformer Engine {VERSIONS[0]}: its own Python, with plain torch in place of its kernels"


def _call_what_is_missing() -> None:
    import transformer_engine_torch

    from tests.support.te_types import MissingError

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
