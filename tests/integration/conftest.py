"""What integration tests share: one process with Megatron imported, and checkpoints every job can start from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron.schedules.job.flags import SEARCH_VARIABLE
from tests.integration.results import MODEL, UNTIED, Result
from tests.integration.server import VERSIONS, Megatron

Flags = tuple[str, ...]


class Training:
    """Training jobs of the small model, all from the same weights.

    Weights drawn at start depend on the pipeline rank, so a PP=1 job writes them and every other job loads them.
    """

    def __init__(self, megatron: Megatron, folder: Path, small: Sequence[str] = MODEL) -> None:
        self._megatron, self._folder, self._small = megatron, folder, small
        self.stock = cache(self._stock)

    def __call__(
        self,
        world: int,
        *flags: str,
        tied: bool = False,
        model: Flags = (),
        samples: str = "plain",
        adapters: bool = False,
        attention: str = "stock",
        orders: Sequence[Sequence[Sequence[int]]] = (),
        streams: bool = False,
    ) -> Result:
        """Train with ``flags`` on ``world`` ranks.

        Args:
            tied: whether embedding and output layer share their weights.
            model: those flags that say what parameters there are.
            samples, adapters, attention, orders, streams: as :func:`.jobs.train` knows them.
        """
        # Where a hybrid model's stages begin and end is no matter of its weights.
        start = self.load(tied, (*_layers(flags), *(flag.replace("|", "") for flag in model)), attention)
        others = {"samples": samples, "adapters": adapters, "attention": attention, "orders": orders}
        others |= {"streams": streams}
        return self._run(world, *flags, *model, *start, tied=tied, **others)

    def fresh(self, world: int, *flags: str) -> Result:
        """Train from weights that Megatron draws, which differ between pipelines of other sizes."""
        return self._run(world, *flags, tied=False)

    def resume(
        self, world: int, *flags: str, load: Path, iteration: int, tied: bool = False, samples: str = "plain"
    ) -> Result:
        """Go on with ``flags`` from what another job saved in ``load`` after ``iteration``.

        Raises:
            AssertionError: where Megatron has begun afresh instead, as it does when it finds nothing to load.
        """
        result = self._run(
            world, *flags, "--load", str(load), "--ckpt-step", str(iteration), tied=tied, samples=samples
        )
        assert result.iterations[:1] == [iteration + 1], f"did not go on after {iteration}: {result.iterations}"
        return result

    def _stock(self, world: int, *flags: str, **rest: Any) -> Result:
        """The same, remembered: for runs without our schedules that many tests compare with."""
        assert "--pipeline-schedule" not in flags
        return self(world, *flags, **rest)

    def load(self, tied: bool = False, model: Flags = (), attention: str = "stock") -> list[str]:
        """The flags with which a job begins from the common weights of a model with these flags."""
        digest = hashlib.sha256(" ".join(model).encode()).hexdigest()[:16]
        folder = self._folder / f"{'tied' if tied else 'untied'}-{digest}"
        if not folder.exists():
            once = "--train-iters 1 --global-batch-size 1 --lr 0 --min-lr 0 --save-interval 1 --no-save-optim".split()
            # Attention has no weights of its own, but may have to be the one that can be built for this model.
            self._run(1, *once, *model, "--save", str(folder), tied=tied, attention=attention)
        return ["--load", str(folder), "--finetune", "--no-load-optim", "--no-load-rng"]

    def _run(self, world: int, *flags: str, tied: bool, **others: Any) -> Result:
        ends: list[str] = [] if tied else UNTIED
        result: Any = self._megatron("train", world, [*self._small, *ends, *flags], **others)
        assert isinstance(result, Result)
        return result


def _layers(flags: Sequence[str]) -> list[str]:
    """The flag among ``flags`` that sets another number of layers, which needs weights of its own."""
    at = flags.index("--num-layers") if "--num-layers" in flags else len(flags)
    return list(flags[at : at + 2])


@pytest.fixture(scope="session", autouse=True)
def _short_searches() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SEARCH_VARIABLE, "0.3")
        yield


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


@pytest.fixture(scope="session")
def te() -> Iterator[Megatron]:
    """The process that has Transformer Engine's Python too, of the newest version."""
    server = Megatron(VERSIONS[-1])
    yield server
    server.close()


@pytest.fixture(scope="session")
def te_train(te: Megatron, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Training jobs with Transformer Engine's layers, in bf16 and with gradient accumulation fusion."""
    local = ("--transformer-impl", "local", "--no-gradient-accumulation-fusion")
    return Training(
        te, tmp_path_factory.mktemp("checkpoints"), [*(flag for flag in MODEL if flag not in local), "--bf16"]
    )
