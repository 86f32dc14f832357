"""The colours of the pages, as eyes see them that lack one kind of cone (Machado, Oliveira and Fernandes 2009)."""

import re
from pathlib import Path

import numpy as np
import pytest

import mha_c

VIZ = Path(mha_c.__file__).parent / "viz"
EYES = {
    "all three": np.eye(3),
    "no red cones": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green cones": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "no blue cones": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


def linear(rgb):
    """Light, of a colour as screens are told it."""
    x = np.asarray(rgb) / 255
    return np.where(x <= 0.04045, x / 12.92, ((x + 0.055) / 1.055) ** 2.4)


def lab(light):
    """CIE L*a*b*, in which a difference of 2.3 is just seen."""
    xyz = (
        np.clip(light, 0, 1)
        @ np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]).T
    )
    ratio = xyz / np.array([0.9505, 1, 1.089])
    f = np.where(ratio > 216 / 24389, np.cbrt(ratio), (24389 / 27 * ratio + 16) / 116)
    return np.stack([116 * f[..., 1] - 16, 500 * (f[..., 0] - f[..., 1]), 200 * (f[..., 1] - f[..., 2])], axis=-1)


@pytest.mark.parametrize("eyes", EYES)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_weights_read_by_lightness_alone(theme, eyes):
    """Every eighth of the scale is lighter (on dark paper) or darker than the one before, for everybody."""
    text = (VIZ / "base.js").read_text(encoding="utf-8").partition("const RAMPS")[2]
    stops = re.findall(r"#([0-9a-f]{6})", re.search(rf"{theme}: \[(.*?)\]", text, re.DOTALL).group(1))
    colours = [[int(stop[i : i + 2], 16) for i in (0, 2, 4)] for stop in stops]
    lightness = lab(linear(colours) @ np.array(EYES[eyes]).T)[:, 0]
    steps = np.diff(lightness) * (1 if theme == "dark" else -1)
    assert (steps > 2.3).all(), lightness


@pytest.mark.parametrize("eyes", EYES)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_two_curves_of_a_plot_are_told_apart(theme, eyes):
    """From each other and from the paper; one of them is dashed besides."""
    text = (VIZ / "base.js").read_text(encoding="utf-8").partition("const COLORS")[2]
    colours = dict(
        re.findall(r'(\w+): "#([0-9a-f]{6})"', re.search(rf"{theme}: \{{(.*?)\}}", text, re.DOTALL).group(1))
    )
    rgb = [[int(colours[name][i : i + 2], 16) for i in (0, 2, 4)] for name in ("line", "other", "wash")]
    seen = lab(linear(rgb) @ np.array(EYES[eyes]).T)
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert np.linalg.norm(seen[first] - seen[second]) > 23


@pytest.mark.parametrize("eyes", EYES)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_signs_are_told_apart(theme, eyes):
    """Plus, minus and nothing at all: ten times what is just seen lies between each two of them."""
    text = (VIZ / "grids.js").read_text(encoding="utf-8").partition("const SIDES")[2].partition("};")[0]
    side = re.search(rf"{theme}: \{{(.*?)\}}", text).group(1)
    colours = np.array([[int(x) for x in triple.split(",")] for triple in re.findall(r"\[([\d, ]+)\]", side)])
    seen = lab(linear(colours) @ np.array(EYES[eyes]).T)
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert np.linalg.norm(seen[first] - seen[second]) > 23
