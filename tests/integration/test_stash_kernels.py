"""Stand-ins for the kernels of a paged stash do what Megatron's do in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.waiting import HANGS_S

ROOT = Path(__file__).resolve().parents[2]

RUN = """
import importlib.util, json, sys
import torch
from tests.support import paged_stash

spec = importlib.util.spec_from_file_location("stock_kernels", sys.argv[1])
stock = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stock)
ours = paged_stash._Kernel(paged_stash.copy), paged_stash._Kernel(paged_stash.pop)
page, width, pages, rows = 4, 8, 6, 24
torch.manual_seed(0)
sizes = {"PAGE_SIZE": page, "HIDDEN_SIZE": width, "BLOCK_SIZE": 8}


def number(value):
    return torch.tensor([value], dtype=torch.int64)


def stashed(kernels, free, count, rows_in, overflowed):
    copy, pop = kernels
    stash, free, tokens, overflow = torch.zeros(pages * page, width), free.clone(), number(count), number(overflowed)
    head, tail, capacity = torch.tensor([3, 0]), torch.tensor([8, 0]), torch.tensor([pages, 0])
    record, spilled, spill, none = torch.zeros(pages, dtype=torch.int64), number(0), number(0), number(0)
    new_head, new_tail = (torch.zeros(2, dtype=torch.int64) for _ in range(2))
    back = torch.zeros(rows, width)
    copy[(4,)](
        rows_in, stash, stash, tokens, free, none, head, tail, capacity, record, overflow, spill, spilled, new_head,
        HAS_HOST_BUFFER=0, **sizes,
    )
    pop[(4,)](
        stash, stash, back, tokens, record, spilled, overflow, free, none, tail, capacity, new_tail, **sizes
    )
    return stash, free, record, overflow, spilled, new_head, new_tail, back


differing, overflows, full = [], 0, 0
for count in [*range(rows + 1), *range(rows + 1)]:
    given = torch.randperm(pages), count, torch.randn(rows, width), int(len(differing) + count == 7)
    theirs = stashed((stock.paged_stash_copy_kernel, stock.paged_stash_pop_kernel), *given)
    differing += [count for a, b in zip(theirs, stashed(ours, *given)) if not torch.equal(a, b)]
    overflows += int(theirs[3])
    full += bool(theirs[-1].any())
json.dump([differing, overflows, full], sys.stdout)
"""


@pytest.mark.nightly
def test_rows_go_to_the_pages_that_megatrons_kernels_choose() -> None:
    package = find_spec("megatron.core")
    assert package is not None and package.origin is not None
    kernels = Path(package.origin).parent / "transformer/moe/ops/paged_stash.py"
    if not kernels.exists():
        pytest.skip("this Megatron has no paged stash")
    command = [sys.executable, "-W", "ignore", "-c", RUN, str(kernels)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stderr
    differing, overflows, full = json.loads(done.stdout)
    assert differing == [] and overflows > 2 and full > 20
