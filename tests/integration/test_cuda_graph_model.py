"""The model of CUDA graphs does on a CPU what a GPU's graphs do, and notices what they do wrongly without a word."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import HANGS_S

ROOT = Path(__file__).resolve().parents[2]

START = """
pool, weight = model.graph_pool_handle(), torch.nn.Parameter(torch.randn(4, 4))
main, x, given = torch.zeros(4, 4), torch.randn(3, 4, requires_grad=True), torch.empty(3, 4)
def captured(function):
    graph = model.CUDAGraph()
    with model.graph(graph, pool=pool):
        result = function()
    return graph, result
"""

CHECKS = {
    "replays_compute_with_new_inputs": """
forward, y = captured(lambda: torch.relu(x @ weight))
def both():
    gx, gw = torch.autograd.grad(y, (x, weight), given)
    main.add_(gw)
    return gx
backward, gx = captured(both)
assert main.abs().sum() == 0, "a capture computes nothing"
for _ in range(3):
    new, gradient, before = torch.randn(3, 4), torch.randn(3, 4), main.clone()
    x.data.copy_(new)
    forward.replay()
    expected = torch.relu(new.clone().requires_grad_() @ weight)
    assert torch.equal(y, expected)
    given.copy_(gradient)
    backward.replay()
    expected.backward(gradient)
    assert torch.equal(main, before + weight.grad)
    weight.grad = None
""",
    "freed_memory_goes_to_the_next_capture": """
first, a = captured(lambda: x.detach() * 2)
kept = model.weak(a)
del a
second, b = captured(lambda: x.detach() * 3)
assert kept.data_ptr() == b.data_ptr()
first.replay()
second.replay()
assert torch.equal(kept, x.detach() * 3), "what reads the first result later reads the second's"
""",
    "reading_a_number_on_the_host_is_refused": """
try:
    captured(lambda: (x.detach() * 1).sum().item())
except model.CaptureError as error:
    assert "reads from the device inside a capture" in str(error)
else:
    raise AssertionError("not refused")
""",
    "memory_that_was_freed_is_refused": """
outside = torch.randn(3)
graph, _ = captured(lambda: outside * 2)
del outside
try:
    graph.replay()
except model.CaptureError as error:
    assert "was freed since" in str(error)
else:
    raise AssertionError("not refused")
""",
}


RUN = """
import json, sys, traceback
import torch
from tests.support import cuda_graphs as model
model.install()
failures = {}
for name, text in json.load(sys.stdin).items():
    try:
        exec(text, {"torch": torch, "model": model})
    except BaseException:
        failures[name] = traceback.format_exc()
json.dump(failures, sys.stdout)
"""


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    """What went wrong, by check, in a process of its own: the model replaces torch's graphs."""
    texts = json.dumps({name: START + text for name, text in CHECKS.items()})
    command = [sys.executable, "-c", RUN]
    done = subprocess.run(command, cwd=ROOT, input=texts, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("check", CHECKS)
def test_the_model_of_cuda_graphs(check: str, failures: dict[str, str]) -> None:
    assert check not in failures, failures[check]
