"""Hostile values of a flag, by the kinds of value that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto


class Kind(Enum):
    """What a flag takes."""

    SWITCH = auto()
    NUMBER = auto()
    LIST = auto()
    NAME = auto()
    FORM = auto()
    INPUT = auto()
    OUTPUT = auto()
    FOLDER = auto()
    CHUNKS = auto()
    SPEED = auto()
    SPAN = auto()
    SIZE = auto()


NUMBERS = """
    nan inf -inf -1 -0.0 0 1 2 3.5 1e3 1e18 1e100 1e101 1e308 1e400 1e-100 1e-320 0x10 1_0 12abc half 1,2 ½ ٣ -- -v ''
    00000000000000000000004 +4 4. .5 1e 9999999 2**31 18446744073709551617 None True $HOME ; | %s {} \\
""".split()
NUMBERS += ["", " ", "4 ", "\t8", "\n", "9" * 30, "9" * 400, "9" * 5000, "-" + "9" * 5000, "0." + "1" * 5000, "é" * 300]
MORE_NUMBERS = """
    ² 2147483647 2147483648 9223372036854775807 -9223372036854775808 1000000 -2 0.0001 5GiB GiB nanGiB 1e308GiB
    -1GiB 0GiB 80GB 1e400GiB infMiB 1-2 2-1 5-5 0-3 -3-5 1-99999999999999999999 a-b 3- 1=2 99=1 -1=1 1=nan 1=-1 1=1e308
""".split()
LISTS = ["", ",", "1,,1", "1,1,1,", "1;1;1", "0,0,0,0,0,0,0,0", "1,1,1,1,1,1,1,1", ",".join(["1"] * 5000)]
LISTS += ["1,1,1", "1,1", "1,1,1,1,1", "1,1,1,1e18", "1e100,1e-100,1", "1e308,1,1", "1e-320,1,1", "0,1,1", "nan,1,1,1"]
LISTS += ["1,-2,1,1,1,1,1,1", "1e100,1,1,1,1,1,1,0", "1e308,1,1,1,1,1,1,1", "inf,1,1,1,1,1,1,1", "a,b,c,d,e,f,g,h"]
MORE_LISTS = ["4,4,4,4,4,4,4,4", "8,0,0,0,0,0,0,0", "1e9,1,1,1,1,1,1,1", "9" * 30 + ",1,1,1", "0.5,1,1,1,1,1,1,1"]
NAMES = ["", " ", "v-haff", "V-HALF", "v_half", "file", "adaptive", "1f1b", "x" * 5000, "\n", "--", "é", "none", "all"]
FORMS = ["", "svg", "text", "csv", "json", "markdown", "html", "trace", "SVG", "pdf", "x" * 5000]
CHUNKS = """
    : :: :2 adaptive: adaptive:0 adaptive:-1 adaptive:1.5 adaptive:3 adaptive:1000 adaptive:1001 adaptive:٣ adaptive:2:2
    interleaved-1f1b:1 interleaved-1f1b:4 interleaved-1f1b:x v-half:2 v-half:3 v-haff:2 file: file:2 .csv none.csv:2
    none.CSV mine.csv.gz
""".split()
CHUNKS += ["adaptive:" + "9" * 5000, "adaptive:\x1b[31m", "adaptive: 2"]
SPEEDS = """
    none= none=1 recompute=1 offload= offload=0 offload=-1 offload=nan offload=inf offload=1e400 offload=1e-320
    offload=x offload=25
    offload=25=25 offload=25GB both= both=0.5 both=1e308 both=1e-100 Offload =25 offload,recompute auto
""".split()
SPANS = """
    out:2-4 out:4-2 out:2-2 out:0-3 out:-1-3 out:3 out: out:: :2-4 : out:2-99999999999999 out:a-b out:2-4-6 out:2:3-5
    out:2_4 out:٢-٤
""".split()
SIZES = """
    64 64x80GiB x80GiB x 64x x80 x80TiB x0GiB x-1GiB xnanGiB xinfGiB x1e308GiB x1e400GiB 0x80GiB -4x80GiB 4x80GiBx
    4X80GiB 64x80gib 64x80GB 64x800MiB 64x80GiB80 1.5x80GiB ٣x80GiB 99999999999999999999x80GiB xGiB
""".split()
# What a terminal would obey, and what no encoding has.
CONTROLS = ["\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "a\rb", "a\x08b", "\x7f", "\x9b31m", "\ud800", "a\nb\nc"]
# Of Python, a shell and a template.
CODE = [
    "__import__('os').system('true')",
    "$(true)",
    "`true`",
    "{0}",
    "%(prog)s",
    "@file",
    "[0]*10**9",
    "[1]*99999999999",
]
# Beyond these a search takes the time that it was asked to take.
_LONGEST_SEARCH = 3


def values(
    kinds: frozenset[Kind],
    choices: Sequence[str] = (),
    inputs: Sequence[str] = (),
    outputs: Sequence[str] = (),
    every: int = 1,
) -> list[str]:
    """Hostile values of a flag of ``kinds``; those of all kinds where none is known.

    Args:
        kinds: of the flag.
        choices: words that the flag knows.
        inputs, outputs: paths to read from, and to write to.
        every: of those that are rarely given by mistake, each so-manieth only.
    """
    usual = {
        Kind.NUMBER: NUMBERS,
        Kind.LIST: LISTS,
        Kind.NAME: NAMES,
        Kind.FORM: FORMS,
        Kind.INPUT: inputs,
        Kind.OUTPUT: outputs,
        Kind.FOLDER: outputs,
        Kind.CHUNKS: CHUNKS,
        Kind.SPEED: SPEEDS,
        Kind.SPAN: SPANS,
        Kind.SIZE: SIZES,
    }
    rare = {Kind.NUMBER: MORE_NUMBERS, Kind.LIST: MORE_LISTS}
    found, others = (
        [value for kind, group in groups.items() if kind in kinds or not kinds for value in group]
        for groups in (usual, rare)
    )
    return list(dict.fromkeys([*choices, *found, *[*others, *CONTROLS, *CODE][::every]]))


def short(seconds: str) -> bool:
    """Whether a search that takes so long, as somebody wrote it, is over soon."""
    try:
        return not _LONGEST_SEARCH < float(seconds) < float("inf")
    except ValueError:
        return True
