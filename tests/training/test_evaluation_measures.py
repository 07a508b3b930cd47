"""The figures are right where the truth is known."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.linalg import sqrtm

from tests.training.evaluation_sprites import sprite_set
from training.data.backgrounds import COLOURS
from training.data.claims import BACKGROUNDS
from training.data.scene_dataset import evaluation_scenes
from training.data.settings import DataSettings, SceneSettings
from training.evaluation.background import background_colours, shows_background
from training.evaluation.features import FeatureExtractor
from training.evaluation.frechet import frechet_distance
from training.evaluation.measures import Cost, Figures, Judge, Share, cost_of
from training.evaluation.pictures import DrawnPicture
from training.evaluation.prompts import scene_prompts
from training.evaluation.recogniser import Recogniser, Retrieval, retrieval
from training.evaluation.samples import save_samples
from training.evaluation.tables import markdown_table

RNG = np.random.default_rng(0)
SPRITES = sprite_set()


def rows_with(mean, covariance, count):
    """`count` rows whose sample mean and covariance are exactly these."""
    width = len(mean)
    rows = RNG.normal(size=(count, width))
    rows -= rows.mean(axis=0)
    rows = np.linalg.qr(rows)[0] * np.sqrt(count - 1)
    return rows @ np.linalg.cholesky(covariance).T + mean


def random_covariance(width):
    root = RNG.normal(size=(width, width))
    return root @ root.T + 0.1 * np.eye(width)


# -- Frechet distance ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [5, 200])
def test_a_set_lies_at_no_distance_of_itself(count):
    rows = RNG.normal(size=(count, 20)).astype(np.float32) * 100.0
    assert frechet_distance(rows, rows) == pytest.approx(0.0, abs=1e-6)
    assert frechet_distance(rows, RNG.permutation(rows)) == pytest.approx(0.0, abs=1e-6)


def test_distance_of_known_gaussians_is_the_closed_form():
    mean_a, mean_b = RNG.normal(size=6), RNG.normal(size=6)
    cov_a, cov_b = random_covariance(6), random_covariance(6)
    closed = np.square(mean_a - mean_b).sum() + np.trace(cov_a + cov_b - 2.0 * sqrtm(cov_a @ cov_b).real)
    assert frechet_distance(rows_with(mean_a, cov_a, 50), rows_with(mean_b, cov_b, 80)) == pytest.approx(closed)


def test_isotropic_gaussians_differ_by_mean_and_spread():
    ours, theirs = rows_with(np.zeros(4), np.eye(4), 30), rows_with(np.full(4, 3.0), 4.0 * np.eye(4), 40)
    assert frechet_distance(ours, theirs) == pytest.approx(4 * 3.0**2 + 4 * (2.0 - 1.0) ** 2)
    assert frechet_distance(theirs, ours) == pytest.approx(frechet_distance(ours, theirs))


def test_more_features_than_rows_change_nothing():
    ours, theirs = RNG.normal(size=(12, 5)), RNG.normal(size=(15, 5)) + 0.5
    rotation = np.linalg.qr(RNG.normal(size=(300, 5)))[0].T  # the same rows in a space they cannot fill
    assert frechet_distance(ours @ rotation, theirs @ rotation) == pytest.approx(frechet_distance(ours, theirs))


@pytest.mark.parametrize("shapes", [((1, 4), (9, 4)), ((9, 4), (9, 5)), ((9,), (9,))])
def test_sets_without_a_distance_are_refused(shapes):
    with pytest.raises(ValueError, match=r"rows"):
        frechet_distance(*(np.zeros(shape) for shape in shapes))


def test_real_pictures_are_nearer_to_others_of_their_split_than_scrambled_ones_are():
    prompts = scene_prompts(SPRITES, DataSettings(size=32), 40, seed=0)
    judge = Judge(prompts, FeatureExtractor(side=64), None, {})
    scrambled = [RNG.permuted(picture.reshape(-1, 3), axis=0).reshape(picture.shape) for picture in prompts.pictures]
    assert 0.0 < 2.0 * judge.figures(prompts.pictures).frechet < judge.figures(scrambled).frechet


# -- retrieval -------------------------------------------------------------------------------------------------------


def fitted(shuffled=False, count=60, width=40):
    """A recogniser of `count` concepts, fitted on noisy copies of their features; and those features."""
    names = RNG.normal(size=(count, 24))
    names /= np.linalg.norm(names, axis=1, keepdims=True)
    centres = 3.0 * RNG.normal(size=(count, width))
    concepts = np.repeat(np.arange(count), 8)
    features = centres[concepts] + 0.1 * RNG.normal(size=(len(concepts), width))
    told = RNG.permutation(concepts) if shuffled else concepts
    return Recogniser.fit(features, told, names, ridge=1e-3), centres


def test_separable_features_are_all_named():
    recogniser, centres = fitted()
    asked = np.repeat(np.arange(len(centres)), 5)
    seen = centres[asked] + 0.1 * RNG.normal(size=(len(asked), centres.shape[1]))
    found = retrieval(recogniser.ranks(seen, asked))
    assert found.recall_1 > 0.9
    assert found.recall_5 > 0.99
    assert found.median_rank == 1


def test_features_of_other_concepts_are_named_by_chance():
    for recogniser, centres in (fitted(), fitted(shuffled=True)):
        asked = np.repeat(np.arange(len(centres)), 20)
        seen = centres[RNG.permutation(asked)] + 0.1 * RNG.normal(size=(len(asked), centres.shape[1]))
        found = retrieval(recogniser.ranks(seen, asked))
        assert found.recall_1 == pytest.approx(1 / len(centres), abs=0.03)
        assert found.recall_10 == pytest.approx(10 / len(centres), abs=0.1)
        assert found.median_rank == pytest.approx(len(centres) / 2, abs=8)


def test_a_recogniser_that_cannot_tell_concepts_apart_is_never_right():
    names = np.ones((5, 3)) / np.sqrt(3)
    recogniser = Recogniser(names, np.zeros((4, 3)), np.zeros(4), np.zeros(3))
    assert (recogniser.ranks(RNG.normal(size=(7, 4)), np.zeros(7, int)) == 5).all()


def test_recall_counts_ranks_up_to_k():
    assert retrieval(np.array([1, 5, 6, 10, 11])) == Retrieval(0.2, 0.4, 0.8, 6.0)


# -- background ------------------------------------------------------------------------------------------------------


def scenes(kind, count=120, size=64):
    settings = SceneSettings(**{name: float(name == kind) for name in BACKGROUNDS})
    return evaluation_scenes(SPRITES, count, kind="single", size=size, settings=settings)


@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("kind", BACKGROUNDS)
def test_backgrounds_of_real_scenes_are_right(kind, size):
    found = scenes(kind, 60, size)
    assert {scene.claims.background.kind for scene in found} == {kind}
    assert all(shows_background(scene.image, scene.claims.background) for scene in found)


@pytest.mark.parametrize("objects", ["pair", "count"])
def test_more_objects_do_not_hide_the_background(objects):
    found = evaluation_scenes(SPRITES, 100, kind=objects, size=64)
    assert np.mean([shows_background(scene.image, scene.claims.background) for scene in found]) > 0.97


def test_noise_leaves_backgrounds_right():
    for scene in scenes("solid"):
        noisy = np.clip(scene.image + RNG.normal(0.0, 12.0, scene.image.shape), 0, 255).astype(np.uint8)
        assert shows_background(noisy, scene.claims.background)


def test_a_repainted_background_is_wrong_and_its_new_colour_is_found():
    for scene in scenes("solid"):
        colour = next(name for name in COLOURS if name not in scene.claims.background.colours)
        repainted = scene.image.copy()
        repainted[(scene.image == scene.image[0, 0]).all(axis=2)] = COLOURS[colour]
        assert not shows_background(repainted, scene.claims.background)
        assert background_colours(repainted, "solid") == (colour,)


@pytest.mark.parametrize("kind", ["gradient", "floor"])
def test_two_colours_the_wrong_way_round_are_wrong(kind):
    assert not any(shows_background(scene.image[::-1], scene.claims.background) for scene in scenes(kind))


# -- cost, table, samples --------------------------------------------------------------------------------------------


def drawn(seconds, accepted, corrected, rate, concurrency=4):
    report = {
        "seconds": {"total": seconds},
        "cloud": {"forwards": 10},
        "draft": {"accepted": accepted, "corrected": corrected},
        "cloud_call_rate": rate,
    }
    return DrawnPicture(np.zeros((8, 8, 3), np.uint8), report, concurrency)


def test_cost_is_the_mean_over_pictures_and_acceptance_that_over_tokens():
    cost = cost_of([drawn(1.0, 30, 10, 1.0), drawn(3.0, 10, 0, 0.5, concurrency=2)])
    assert cost == Cost(2.0, 10.0, 0.8, 0.75, (2, 4))
    assert cost_of([drawn(1.0, 0, 0, 0.0)]).accepted is None


def test_the_table_has_a_row_a_set_and_no_empty_columns():
    retrieved = Retrieval(0.5, 0.75, 1.0, 2.0)
    rows = {
        "real": Figures(4, 12.34, retrieved, {"solid": Share(1, 2), "gradient": Share(0, 0)}),
        "sd": Figures(4, 1.0),
    }
    assert markdown_table(rows).splitlines() == [
        "| pictures | n | Frechet | R@1 | R@5 | R@10 | median rank | solid background |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| real | 4 | 12.3 | 50.0% | 75.0% | 100.0% | 2 | 50.0% |",
        "| sd | 4 | 1.0 | - | - | - | - | - |",
    ]


def test_sample_sheets_are_palette_pictures_that_fit_the_limit(tmp_path: Path):
    pictures, captions = list(RNG.integers(0, 256, (8, 64, 64, 3), np.uint8)), ["a caption"] * 8
    sizes = {}
    for limit in (1_000_000, 30_000):
        path = tmp_path / "sheets" / f"{limit}.png"
        save_samples(pictures, captions, path, limit)
        sizes[limit] = path.stat().st_size
        with Image.open(io.BytesIO(path.read_bytes())) as sheet:
            assert sheet.mode == "P"
    assert sizes[30_000] < 30_000 < sizes[1_000_000]
    assert [path.suffix for path in (tmp_path / "sheets").iterdir()] == [".png", ".png"]
