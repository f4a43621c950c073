"""Split gradients of Transformer Engine's linears are those of its whole backward, bit for bit.

Over its own Python of each pinned version on the CPU; where there is a GPU, over all of it.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch

from tests.integration import te_itself
from tests.integration.server import VERSIONS, Megatron


@pytest.mark.parametrize("case", [*te_itself.cases("cuda")], ids=str)
def test_transformer_engine_itself(case: te_itself.Case):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")
    importlib.import_module("megatron.training")  # what Transformer Engine is asked about comes after it
    te_itself.check(case)


def _every_case() -> tuple[str, list[str]]:
    passed = []
    for case in te_itself.cases("cpu"):
        te_itself.check(case)
        passed.append(str(case))
    return sys.modules["transformer_engine"].__version__, passed


@pytest.mark.parametrize("version", VERSIONS)
def test_its_own_python_on_the_cpu(version: str, request: pytest.FixtureRequest):
    """Each kind of module, with and without bias, fused or not, in two orders."""
    newest: Any = version == VERSIONS[-1]
    server = request.getfixturevalue("te") if newest else Megatron(version)
    try:
        ((found, passed),) = server("in_groups", 1, _every_case)
    finally:
        if not newest:
            server.close()
    assert found == version and len(passed) == 8 * len(te_itself.KINDS)
