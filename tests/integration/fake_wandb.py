"""What training calls of Weights & Biases, which needs an account: it writes down what it is given."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def put_in_place() -> None:
    """Make ``import wandb`` find this, in this process."""
    wandb: Any = ModuleType("wandb")
    folder: list[Path] = []

    def init(*, dir: str, config: Any, **named: Any) -> None:
        assert config
        folder.append(Path(dir))

    def log(values: dict[str, Any], step: int | None = None) -> None:
        with (folder[0] / "logged.jsonl").open("a") as file:
            file.write(json.dumps([step, {name: float(value) for name, value in values.items()}]) + "\n")

    wandb.init, wandb.log, wandb.finish, wandb.run, wandb.config = init, log, lambda: None, None, {}
    sys.modules["wandb"] = wandb
