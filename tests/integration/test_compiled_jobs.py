"""Megatron's fused functions compiled by torch, as on GPUs: the result is that of stock's schedule compiled likewise.

Other jobs leave the compiler off, because it takes longer than they do.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import product

import pytest

from tests.integration.equal_logs import differences
from tests.integration.features import MODERN, OVERLAP, TENSOR
from tests.integration.results import MODEL, UNTIED, Logged
from tests.integration.server import Megatron

pytestmark = pytest.mark.nightly

FUSED = [flag for flag in MODEL if flag != "--no-bias-dropout-fusion"]
JOB = [*FUSED, *UNTIED, *"--num-layers 4 --train-iters 2 --global-batch-size 4 --clip-grad 1000".split()]
JOB += ["--pipeline-model-parallel-size", "2"]

SCHEDULES = {
    "zb-1p": "zb-1p",
    "v-half": "v-half",
    "adaptive with recompute": "adaptive --pipeline-memory-limit 0.4 --pipeline-save-memory recompute",
    "interleaved-1f1b": "interleaved-1f1b",
}
ENTROPY = "--cross-entropy-loss-fusion --cross-entropy-fusion-impl native"
JOBS = {
    "GELU": (2, ""),
    "Llama, fused cross entropy": (2, f"{MODERN} {ENTROPY}"),
    "tensor and sequence parallel": (4, f"{TENSOR} --sequence-parallel"),
    "bf16, overlapped distributed optimizer": (
        4,
        f"--bf16 --use-distributed-optimizer {OVERLAP} --overlap-param-gather",
    ),
    "multi-token prediction": (2, f"--mtp-num-layers 1 {MODERN}"),
}


@pytest.fixture(scope="module")
def compiling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Megatron]:
    """The process that has Megatron with its fused functions compiled, whose code all its jobs share."""
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        pytest.skip("no C++ compiler, which torch compiles with on CPUs")
    server = Megatron(compiled=tmp_path_factory.mktemp("compiled"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def stock(compiling: Megatron) -> dict[str, Logged]:
    """Jobs without our schedules, by name, as they are asked for."""
    return {}


@pytest.mark.parametrize(
    ("job", "schedule"),
    product(JOBS, SCHEDULES),
)
def test_compiled_functions_give_stocks_result(
    compiling: Megatron, stock: dict[str, Logged], job: str, schedule: str
) -> None:
    world, flags = JOBS[job]
    if job not in stock:
        stock[job] = compiling("logged", world, [*JOB, *flags.split()])
    wanted = stock[job]
    asked = SCHEDULES[schedule]
    if "mtp" in flags:  # one of two ranks holds most of it
        asked = asked.replace("-limit 0.4", "-limit 0.75")
    ours = compiling("logged", world, [*JOB, *flags.split(), "--pipeline-schedule", *asked.split()])
    assert min(wanted.graphs) > 0 and min(ours.graphs) > 0, "nothing was compiled"
    assert differences(ours, wanted) == []
