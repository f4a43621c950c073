"""How the command line refuses: the same for every wrong use of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megatron.schedules.cli.commands import main


def assert_refused(arguments: Sequence[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on standard error that says ``said``, nothing on standard output, and status 2."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert err.startswith("megatron-schedules")
    assert said in err
