"""Settings of a job that are given without flags: to ``install()``, or as environment variables."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megatron.schedules.integration.flags.declared import add_arguments
from megatron.schedules.integration.flags.refuse import refuse

_SWITCH = {"1": True, "0": False}
# A dry run reads Megatron's flags, so it is asked for by one too.
_BY_FLAG_ONLY = ("help", "pipeline_dry_run")


def settings_without_flags(arguments: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Returns these settings, by the attribute of their flag in Megatron's arguments.

    The variable of ``--pipeline-memory-limit`` is ``$PIPELINE_MEMORY_LIMIT``. An empty variable counts as unset, and a
    switch takes 1 or 0; with another value the process exits with status 2. Arguments go before variables.

    Args:
        arguments: arguments of ``install()``, by name.
    """
    found: dict[str, Any] = {}
    for action in add_arguments(ArgumentParser())._actions:
        name = action.dest
        if name in _BY_FLAG_ONLY:
            continue
        argument, variable = arguments.get(name.removeprefix("pipeline_")), name.upper()
        text, is_switch = os.environ.get(variable), action.nargs == 0
        if argument not in (None, False):
            found[name] = True if is_switch else str(argument)
        elif text and is_switch and text not in _SWITCH:
            refuse(f"${variable} must be 1 or 0, not {text!r}")
        elif text:
            found[name] = _SWITCH[text] if is_switch else text
    return found
