"""A process that imports torch and Megatron once, and forks the ranks of every job it is asked for.

It may have Transformer Engine's Python of one version too, and then Apex's kernels (:mod:`.fused_kernels`) for jobs
without our schedules. It may compile Megatron's fused functions.

Jobs come in as pickles on standard input, results go out on the descriptor given. Run by :class:`Megatron` below, one
for a whole test session.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from megatron.schedules.job.flags import SEARCH_VARIABLE, STALL_VARIABLE
from tests.support import te_python
from tests.support.te_python import CAPABILITY_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
# Those that a test may set for the ranks of its jobs.
ROUNDING_VARIABLE = "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING"
FUSED_EXPERTS_VARIABLE = "NVTE_CUTEDSL_FUSED_GROUPED_MLP"
"""Megatron asks for it before it has Transformer Engine fuse experts, which reads it itself when it is imported."""
_VARIABLES = (SEARCH_VARIABLE, STALL_VARIABLE, CAPABILITY_VARIABLE, ROUNDING_VARIABLE, FUSED_EXPERTS_VARIABLE)
# Lines of tracebacks of faults that a Megatron has without us too.
_FAILS_IN_STOCK = {
    "in is_inference_column_parallel": "megatron-core 0.20 predicts several tokens with Transformer Engine alone",
    "entry.values[layer_number - 1] +=": "megatron-core 0.20 cannot log experts of layers that predict tokens",
}
VERSIONS = tuple(
    line for line in (ROOT / "scripts/transformer_engine.txt").read_text().split("\n") if line[:1].isdigit()
)
"""Versions of Transformer Engine that the set-up has unpacked, oldest first."""


class Megatron:
    """The client's end: calls functions of :mod:`tests.integration.jobs` in the server, with our settings.

    Args:
        transformer_engine: version that the server has; None for none.
        compiled: folder for the code of Megatron's fused functions, which are then compiled as on a GPU.
    """

    def __init__(self, transformer_engine: str | None = None, compiled: Path | None = None) -> None:
        reader, writer = os.pipe()
        path = [str(ROOT), str(ROOT / "tests/integration")]
        if transformer_engine is not None:
            folder = ROOT / ".venv/transformer_engine" / transformer_engine
            assert folder.exists(), f"no {folder}: run scripts/setup.sh"
            path.insert(0, str(folder))
        if given := os.environ.get("PYTHONPATH"):  # such as a checkout of Megatron-LM
            path.append(given)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
        environment |= {"TORCHDYNAMO_DISABLE": "1", "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "1"}
        if compiled is not None:  # by each rank itself: processes that compile for it would outlive it
            environment |= {"TORCHDYNAMO_DISABLE": "0", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
            environment["TORCHINDUCTOR_CACHE_DIR"] = str(compiled)
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.integration.server", str(writer)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[writer],
            env=environment,
            cwd=ROOT,
        )
        os.close(writer)
        self._results = os.fdopen(reader, "rb")

    def __call__(self, job: str, *args: Any, **named: Any) -> Any:
        """The result of ``job(*args, **named)``; raises AssertionError with the output of the ranks where it failed."""
        assert self._process.stdin is not None
        around = {name: os.environ.get(name) for name in _VARIABLES}
        pickle.dump((job, args, named, around), self._process.stdin)
        self._process.stdin.flush()
        try:
            ok, result = pickle.load(self._results)
        except EOFError:
            _, errors = self._process.communicate()
            raise AssertionError(f"the server of ranks died:\n{errors.decode(errors='replace')[-4000:]}") from None
        if not ok:
            for line, why in _FAILS_IN_STOCK.items():
                if line in result:
                    pytest.skip(why)
            raise AssertionError(result)
        return result

    def close(self) -> None:
        """End the server."""
        self._process.kill()
        self._process.wait()
        self._results.close()


def _serve(requests: BinaryIO, results: BinaryIO) -> None:
    if te_python.is_here():
        from tests.integration.fused_kernels import Kernels

        sys.modules["fused_weight_gradient_mlp_cuda"] = Kernels([])  # type: ignore[assignment]
    if te_python.is_here() or os.environ["TORCHDYNAMO_DISABLE"] == "0":
        te_python.without_gpu()  # before :mod:`.jobs` imports Megatron, which imports Transformer Engine
    from tests.integration import jobs
    from tests.integration.forked_ranks import JobError

    import_module("tests.quick_forks")

    while True:
        try:
            name, args, named, around = pickle.load(requests)
        except EOFError:
            return
        for variable, value in around.items():
            os.environ.pop(variable, None)
            if value is not None:
                os.environ[variable] = value
        try:
            answer = True, getattr(jobs, name)(*args, **named)
        except JobError as error:
            answer = False, str(error)
        pickle.dump(answer, results)
        results.flush()


if __name__ == "__main__":
    _serve(sys.stdin.buffer, os.fdopen(int(sys.argv[1]), "wb"))
