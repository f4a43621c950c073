"""The programs that are swept, each as a function of its arguments, imported where it is called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import click

Program = Callable[[list[str]], Any]


def named(name: str) -> Program:
    """The program ``name``: a tool's module, or a function below."""
    own: dict[str, Callable[[], Program]] = {
        "command_line": command_line,
        "before_megatron": before_megatron,
        "training": training,
    }
    return own[name]() if name in own else tool(name)


def command_line() -> Program:
    """``megatron-schedules``."""
    from megatron.schedules.cli.commands import main

    return main


def before_megatron() -> Program:
    """The checks that ``pretrain_gpt.py`` makes before it imports Megatron."""
    from megatron.schedules.integration.flags.checks import refuse_early
    from megatron.schedules.integration.gpt_data import refuse_other_data

    def call(arguments: list[str]) -> None:
        sys.argv = ["pretrain_gpt.py", *arguments]
        refuse_early(arguments)
        refuse_other_data(arguments)

    return call


def training() -> Program:
    """``pretrain_gpt.py``, where a job that is no dry run ends before it begins."""
    import pretrain_gpt

    pretrain_gpt.pretrain = lambda *_, **__: None  # type: ignore[assignment]

    def call(arguments: list[str]) -> None:
        sys.argv = ["pretrain_gpt.py", *arguments]
        pretrain_gpt.main()

    return call


def tool(name: str) -> Program:
    """The ``main`` of a tool, by its module; profiling ends before it measures, as that needs Megatron."""
    module = importlib.import_module(name)
    if name == "tools.profile_passes":
        module.profile = lambda *_: sys.exit(0)  # type: ignore[attr-defined]
    sys.argv[0] = f"{name.rpartition('.')[2]}.py"
    command = click_command(module)
    if command is None:
        return module.main  # type: ignore[no-any-return]
    from megatron.schedules.cli.ending import run

    return lambda arguments: run(command, name.rpartition(".")[2], arguments, flags=getattr(module, "FLAGS", {}))


def click_command(module: Any) -> click.Command | None:
    """The command of ``module``, where click reads its arguments."""
    return next((each for each in vars(module).values() if isinstance(each, click.Command)), None)
