"""The overlay shows each token's origin and score where the token lies, in colours that mean what the legend says."""

from __future__ import annotations

from itertools import cycle, islice, pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from device.overlay import COLOURS, NO_SCORE, heat_colours, render_overlay
from shared.grid import Grid
from shared.transcript import Provenance, Transcript

GRID = Grid(4, 4)
KINDS = list(islice(cycle(Provenance), 16))
OPACITY = 0.45


def picture(height: int = 128, width: int = 128) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3)).astype(np.uint8)


def transcript(kinds: list[Provenance], grid: Grid = GRID) -> Transcript:
    result = Transcript(grid, 8)
    result.extend([1] * len(kinds), kinds)
    return result


def rising(grid: Grid = GRID) -> NDArray[np.float64]:
    return np.arange(1.0, grid.size + 1.0).reshape(grid.shape)


def panel(overlay: NDArray[np.uint8], index: int, height: int = 384, width: int = 384) -> NDArray[np.uint8]:
    return overlay[:height, index * (width + 8) : index * (width + 8) + width]


def centres(image: NDArray[np.uint8], grid: Grid = GRID) -> NDArray[np.uint8]:
    """Pixels at the centres of cells, (size, 3)."""
    rows, cols = (
        (np.arange(count) * 2 + 1) * side // (2 * count)
        for side, count in zip(image.shape[:2], grid.shape, strict=True)
    )
    return image[rows][:, cols].reshape(-1, 3)


def brightness(colours: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Relative luminance of sRGB (..., 3)."""
    light = colours / 255.0
    light = np.where(light <= 0.04045, light / 12.92, ((light + 0.055) / 1.055) ** 2.4)
    return np.asarray(light @ [0.2126, 0.7152, 0.0722])


def test_the_first_panel_is_the_picture_enlarged_by_a_whole_number() -> None:
    pixels = picture()
    first = panel(render_overlay(pixels, transcript(KINDS), rising()), 0)
    np.testing.assert_array_equal(first[1::3, 1::3], pixels)
    np.testing.assert_array_equal(first[::3, ::3], pixels)


def test_each_cell_has_the_colour_of_its_origin_over_a_grey_picture() -> None:
    pixels = picture()
    overlay = render_overlay(pixels, transcript(KINDS), rising())
    grey = centres(panel(overlay, 0)) @ [0.299, 0.587, 0.114]
    expected = (1 - OPACITY) * grey[:, None] + OPACITY * np.array([COLOURS[kind] for kind in KINDS])
    np.testing.assert_allclose(centres(panel(overlay, 1)), expected, atol=1.0)
    assert len(set(COLOURS.values())) == len(COLOURS) == len(Provenance)


def test_tokens_that_are_not_there_yet_leave_the_picture_as_it_is() -> None:
    overlay = render_overlay(picture(), transcript(KINDS[:6]), np.full(GRID.shape, np.nan))
    plain, tinted = centres(panel(overlay, 0)), centres(panel(overlay, 1))
    assert (plain[:6] != tinted[:6]).any(axis=1).all()
    np.testing.assert_array_equal(plain[6:], tinted[6:])
    empty = render_overlay(picture(), transcript([]), np.full(GRID.shape, np.nan))
    np.testing.assert_array_equal(centres(panel(empty, 1)), plain)


def test_thin_lines_part_the_cells() -> None:
    white = np.full((128, 128, 3), 255, np.uint8)
    second = panel(render_overlay(white, transcript([Provenance.KEPT] * 16), rising()), 1)
    inside = second[48, 48]
    for line in (96, 192, 288):
        assert (second[line, 48] < inside).all()
        assert (second[48, line] < inside).all()
        np.testing.assert_array_equal(second[line + 1, 48], inside)
        np.testing.assert_array_equal(second[line - 1, 48], inside)


@pytest.mark.parametrize("shift", [0.0, -8.0])  # by ratios, and by differences where scores are below zero
def test_brighter_means_less_sure_and_grey_means_no_score(shift: float) -> None:
    scores = rising() + shift
    scores[0, :3] = np.nan
    order = np.random.default_rng(1).permutation(13)
    scores.reshape(-1)[3:] = scores.reshape(-1)[3:][order]
    colours = centres(panel(render_overlay(picture(), transcript(KINDS), scores), 2))
    assert (colours[:3] == NO_SCORE).all()
    assert (colours[3:] != NO_SCORE).any(axis=1).all()
    assert (np.diff(brightness(colours[3:])[np.argsort(scores.reshape(-1)[3:])]) > 0.0).all()


def test_heat_colours_rise_in_brightness_without_a_step_and_from_black_to_nearly_white() -> None:
    light = brightness(heat_colours(np.linspace(0.0, 1.0, 256)))
    assert all(low <= high for low, high in pairwise(light))
    assert light[0] < 0.01 < 0.9 < light[-1]
    lightness = np.where(light < 0.008856, 903.3 * light, 116.0 * np.cbrt(light) - 16.0)  # as the eye sees it: CIE L*
    assert np.diff(lightness).max() < 2.5 * lightness[-1] / 255
    assert (heat_colours(np.array([np.nan])) == NO_SCORE).all()


def test_one_score_far_above_the_others_does_not_blacken_the_map() -> None:
    grid = Grid(16, 16)
    scores = rising(grid)
    scores[8, 8] = 1e9
    colours = centres(panel(render_overlay(picture(), transcript([], grid), scores), 2), grid)
    assert brightness(colours).mean() > 0.2
    assert brightness(colours).argmax() >= 136


@pytest.mark.parametrize("scores", [np.zeros(GRID.shape), np.full(GRID.shape, 2.5), np.full(GRID.shape, np.nan)])
def test_scores_that_are_all_the_same_or_all_absent_are_drawn(scores: NDArray[np.float64]) -> None:
    colours = centres(panel(render_overlay(picture(), transcript(KINDS), scores), 2))
    assert (colours == colours[0]).all()
    assert (colours[0] == NO_SCORE).all() == np.isnan(scores).all()


@pytest.mark.parametrize(
    ("height", "width", "factor"), [(128, 128, 3), (16, 16, 24), (384, 384, 1), (512, 512, 1), (100, 200, 4)]
)
def test_panels_are_whole_multiples_of_at_least_384_pixels(height: int, width: int, factor: int) -> None:
    overlay = render_overlay(picture(height, width), transcript(KINDS), rising())
    assert overlay.dtype == np.uint8
    assert overlay.shape == (height * factor + 64, 3 * width * factor + 16, 3)


def test_cells_of_unequal_size_cover_the_picture() -> None:
    grid = Grid(5, 7)
    kinds = [Provenance.KEPT] * 34 + [Provenance.CORRECTED]
    white = np.full((128, 128, 3), 255, np.uint8)
    second = panel(render_overlay(white, transcript(kinds, grid), rising(grid)), 1)
    assert not (second == 255).all(axis=-1).any()
    assert (centres(second, grid)[:34] == centres(second, grid)[0]).all()
    assert (centres(second, grid)[34] != centres(second, grid)[0]).any()


def test_the_legend_names_only_the_origins_that_occur() -> None:
    def caption(kinds: list[Provenance]) -> NDArray[np.uint8]:
        return render_overlay(picture(), transcript(kinds), rising())[384:, 392:776].reshape(-1, 3)

    few, all_ = caption([Provenance.KEPT] * 16), caption(KINDS)
    for kind in Provenance:
        shown = (all_ == COLOURS[kind]).all(axis=1).any()
        assert shown
        assert (few == COLOURS[kind]).all(axis=1).any() == (kind is Provenance.KEPT)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"scores: a number for each token of the 4x4 grid is needed, not \(4, 5\)"):
        render_overlay(picture(), transcript(KINDS), np.zeros((4, 5)))
    with pytest.raises(ValueError, match=r"pixels: \(H, W, 3\) of uint8 is needed, not \(128, 128\) of uint8"):
        render_overlay(picture()[..., 0], transcript(KINDS), rising())
    with pytest.raises(ValueError, match=r"pixels: .*float64"):
        render_overlay(picture() / 255.0, transcript(KINDS), rising())  # type: ignore[arg-type]
