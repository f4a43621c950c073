"""What integration tests share: one process with Megatron imported, and checkpoints every job can start from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.integration.results import MODEL, UNTIED, Result
from tests.integration.server import Megatron

# Flags that begin so leave the model's parameters what they are; jobs that differ in no others share their weights.
_SHAPES_NOTHING = tuple(
    """
    --train-iters --global-batch-size --micro-batch-size --lr --min-lr --eval- --save --load --exit-
    --tensor-model-parallel-size --sequence-parallel --context-parallel-size --pipeline- --expert-model-parallel-size
    --expert-tensor-parallel-size --account-for- --recompute- --overlap- --bf16 --calculate-per-token-loss --clip-grad
    --use-distributed-optimizer
    """.split()
)


class Training:
    """Training jobs of the small model, those of one shape all from the same weights.

    Weights drawn at start depend on the pipeline rank, so a PP=1 job writes them and every other job loads them.
    """

    def __init__(self, megatron: Megatron, folder: Path) -> None:
        self._megatron, self._folder = megatron, folder
        self._weights: dict[tuple[bool, tuple[str, ...]], Path] = {}
        self.stock = cache(self._stock)

    def __call__(self, world: int, *flags: str, tied: bool = False, attention: str = "stock") -> Result:
        """Train with ``flags`` on ``world`` ranks; ``attention`` is stock's local one, or "plain"."""
        return self._run(world, *flags, *self._load(tied, attention, _shape(flags)), tied=tied, attention=attention)

    def _stock(self, world: int, *flags: str, tied: bool = False, attention: str = "stock") -> Result:
        """The same, remembered: for runs without our schedules that many tests compare with."""
        assert "--pipeline-schedule" not in flags
        return self(world, *flags, tied=tied, attention=attention)

    def _load(self, tied: bool, attention: str, shape: tuple[str, ...]) -> list[str]:
        folder = self._weights.get((tied, shape))
        if folder is None:
            folder = self._folder / str(len(self._weights))
            once = "--train-iters 1 --global-batch-size 1 --lr 0 --min-lr 0 --save-interval 1 --no-save-optim".split()
            self._run(1, *once, *shape, "--save", str(folder), tied=tied, attention=attention)
            self._weights[tied, shape] = folder
        return ["--load", str(folder), "--finetune", "--no-load-optim", "--no-load-rng"]

    def _run(self, world: int, *flags: str, tied: bool, attention: str) -> Result:
        ends: list[str] = [] if tied else UNTIED
        result: Any = self._megatron("train", world, [*MODEL, *ends, *flags], attention)
        assert isinstance(result, Result)
        return result


def _shape(flags: Sequence[str]) -> tuple[str, ...]:
    """The flags among ``flags``, with their values, that may ask for other parameters."""
    kept: list[str] = []
    shapes = False
    for word in flags:
        if word.startswith("--"):
            shapes = not word.startswith(_SHAPES_NOTHING)
        if shapes:
            kept.append(word)
    return tuple(kept)


@pytest.fixture(scope="session")
def megatron() -> Iterator[Megatron]:
    """The process that has Megatron imported."""
    server = Megatron()
    yield server
    server.close()


@pytest.fixture(scope="session")
def train(megatron: Megatron, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Training jobs from common weights."""
    return Training(megatron, tmp_path_factory.mktemp("checkpoints"))
