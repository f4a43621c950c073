"""Transformer Engine itself, where there is a GPU: split gradients are those of its whole backward, bit for bit."""

from __future__ import annotations

import importlib

import fake_te
import pytest
import split_helpers as helpers
import torch

from tests.integration import te_itself


@pytest.mark.parametrize("case", [*te_itself.cases(on_cpu=False)], ids=str)
def test_transformer_engine_itself(case: te_itself.Case):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")
    importlib.import_module("megatron.training")  # what Transformer Engine is asked about comes after it
    te_itself.check(case)


def cases_on_the_stand_in() -> list[str]:
    importlib.import_module("megatron.training")  # without Transformer Engine: the stand-in is not all of it
    fake_te.install()
    for case in te_itself.cases(on_cpu=True):
        te_itself.check(case)
    return [str(case) for case in te_itself.cases(on_cpu=True)]


def test_the_cases_for_a_gpu_are_well_made():
    """Each kind of module but one, with and without bias, fused or not, in two orders."""
    (passed,) = helpers.run_ranks(1, cases_on_the_stand_in)
    assert len(passed) == 8 * (len(te_itself.KINDS) - 1)
