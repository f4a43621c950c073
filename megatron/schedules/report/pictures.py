"""Converts SVG to PNG or PDF with typst, an optional library that needs no other program and includes its own fonts."""

from __future__ import annotations

import importlib.util

from megatron.schedules.utils.errors import PlanError, one_line

PICTURES = ("png", "pdf")
_PIXELS = 192.0  # pixels of a PNG per inch: two per SVG pixel
# Without a date, equal drawings give equal files.
_PAGE = """\
#set document(date: none)
#set page(width: auto, height: auto, margin: 0pt)
#image(bytes(sys.inputs.svg), format: "svg")
"""


def check_library(form: str) -> None:
    """Checks that typst is installed if ``form`` needs it.

    Raises:
        PlanError: if it is not.
    """
    if form in PICTURES and importlib.util.find_spec("typst") is None:
        raise PlanError(
            f"{form} takes the library typst, which is not installed: pip install 'typst>=0.13', which is the extra "
            "[pictures], or use svg"
        )


def picture(svg: str, form: str) -> str | bytes:
    """Converts ``svg`` to one of :data:`PICTURES`; returns it as it is for other forms."""
    if form not in PICTURES:
        return svg
    check_library(form)
    import typst

    try:
        return typst.compile(
            _PAGE.encode(), format="png" if form == "png" else "pdf", ppi=_PIXELS, sys_inputs={"svg": svg}
        )
    except typst.TypstError as error:
        raise PlanError(one_line(f"typst makes no {form} of this drawing: {error}")) from None
