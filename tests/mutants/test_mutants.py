"""Planted faults fit the package as it is; scripts/run_mutants.py says which tests notice them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from scripts.run_mutants import ROOT, Fault, faults

PACKAGE = ROOT / "megatron" / "schedules"


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: fault.name)
def test_a_planted_fault_fits_its_file_and_is_python(fault: Fault, tmp_path: Path) -> None:
    copy = tmp_path / "megatron" / "schedules" / fault.file
    copy.parent.mkdir(parents=True)
    copy.write_text((PACKAGE / fault.file).read_text())
    fault.put_into(tmp_path)
    assert ast.dump(ast.parse(copy.read_text())) != ast.dump(ast.parse((PACKAGE / fault.file).read_text()))
    assert (ROOT / fault.tests).exists()


def test_faults_have_names_of_their_own() -> None:
    assert len({fault.name for fault in faults()}) == len(faults())
