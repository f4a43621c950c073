"""Whether a call ended as every call should: well, or with one line that names what was wrong."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

from tests.sweep.worker import Call, Ending

_LONGEST_LINE = 1000
_PROGRESS = re.compile(r"^(?:(?:planning|placing|choosing) .* after \d+ s|  \d+ documents, .* MB/s)\n", re.MULTILINE)
# A cache that cannot be used, or that is new, costs time, and no job its plan.
_WARNING = re.compile(
    r"^.*(?: is not used: .*; plans and compiled code are not cached, unless |: compiling the search for ).*\n",
    re.MULTILINE,
)
# What Megatron's own parser refuses it says after its usage.
_MEGATRONS = re.compile(r"\Ausage: pretrain_gpt\.py .*?\n(?=pretrain_gpt\.py: error: )", re.DOTALL)
# Older names of a flag, and flags whose value is told with others.
_TOLD_AS = {
    "--hybrid-override-pattern": "--hybrid-layer-pattern",
    "--external-cuda-graph": "--cuda-graph-impl",
}
# Whether a limit is too small depends on every other flag.
_OF_ALL = ("--memory-limit: a memory limit", "--pipeline-memory-limit: a memory limit")


def faults(ended: Iterable[tuple[Call, Ending]], program: str, *, good: tuple[int, ...] = (0,)) -> list[str]:
    """What is wrong with how calls ended, a line a call.

    Args:
        ended: the calls, and how each ended.
        program: with what each error begins.
        good: the exit statuses of a call that was not refused.
    """
    found = ((call, ending, fault(call, ending, program, good)) for call, ending in ended)
    return [f"{why}: {call}: {ending.err[-300:]!r}" for call, ending, why in found if why]


def fault(call: Call, ending: Ending, program: str, good: tuple[int, ...]) -> str:
    """What is wrong with how ``call`` ended, empty where nothing is."""
    err, by_megatron = _MEGATRONS.subn("", _WARNING.sub("", _PROGRESS.sub("", ending.err)))
    if ending.status is None:
        last = ending.err.strip().splitlines()[-1:] or [""]
        return f"no end ({last[0][:80]})"
    if odd := controls(ending.out + ending.err):
        return f"control characters {odd!r} for a terminal"
    if ending.status in good:
        return "success with words of errors" if err else ""
    if ending.status != 2:
        return f"status {ending.status}"
    if not err.startswith(program) or err.count("\n") != 1 or not err.endswith("\n"):
        return "refused in other than one line"
    if len(err) >= _LONGEST_LINE and not by_megatron:
        return "refused in a line that is too long"
    told = (*call.flags, *(_TOLD_AS[flag] for flag in call.flags if flag in _TOLD_AS), *_OF_ALL)
    if call.flags and not any(flag in err for flag in told):
        return f"refused without the flag {' or '.join(call.flags)}"
    return ""


def controls(text: str) -> str:
    """The characters of ``text`` that a terminal obeys, beside ends of lines and tabs."""
    return "".join(sorted({each for each in text if each not in "\n\t" and unicodedata.category(each) == "Cc"}))
