"""Pictures made of an SVG."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from megatron.schedules.report import palette
from megatron.schedules.report.drawing import PICTURES, picture
from megatron.schedules.report.svg import draw_svg
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.utils.errors import PlanError
from tests.report.made import timeline


@pytest.fixture(scope="module")
def svg() -> str:
    return draw_svg([timeline("v-half", 4, 8)], "a <caption> & more")


def test_a_png_shows_the_light_drawing_at_twice_its_size(svg: str):
    shown = Image.open(io.BytesIO(picture(svg, "png"))).convert("RGB")
    wide, high = (float(each) for each in svg.split('viewBox="0 0 ')[1].split('"')[0].split())
    assert shown.size == (round(2 * wide), round(2 * high))
    assert shown.getpixel((shown.width // 2, 4)) == palette.WHITE
    # The first forward of rank 0 begins at the left end of its lane, a little below the heading.
    assert shown.getpixel((2 * 66 + 4, 2 * 42 + 4)) == palette.HUES[Kind.F]


@pytest.mark.parametrize("form", PICTURES)
def test_the_same_drawing_is_the_same_file(form: str, svg: str):
    assert picture(svg, form) == picture(svg, form)


def test_a_pdf_has_one_page_of_vectors(svg: str):
    pdf = picture(svg, "pdf")
    assert isinstance(pdf, bytes)
    assert b"/Type/Pages/Count 1/" in pdf
    assert b"/Subtype/Image" not in pdf


def test_another_form_is_left_alone(svg: str):
    assert picture(svg, "svg") is svg


def test_what_typst_cannot_read_is_one_line():
    with pytest.raises(PlanError, match="typst makes no png of this drawing: ") as refused:
        picture("<svg", "png")
    assert "\n" not in str(refused.value)
