"""Captions say exactly what the claims say, in English."""

from dataclasses import replace

import numpy as np
import pytest

from training.data.backgrounds import COLOURS
from training.data.captions import caption_of, drop_words
from training.data.claims import Background, Claims, ObjectClaim
from training.data.concepts import Concept
from training.data.grammar import noun_phrase
from training.data.nouns import NAMES, SYNONYMS
from training.data.settings import SceneSettings
from training.data.styles import STYLES

OWL = ObjectClaim("1f989", "owl", "owl", "cartoon", "noto")
CHERRIES = ObjectClaim("1f352", "cherries", "cherries", "cartoon", "noto")
RED = Background("solid", ("red",))


def claims_of(kind="single", objects=(OWL,), count=1, relation=None, background=RED):
    return Claims(kind, objects, count, relation, background)


@pytest.mark.parametrize(
    ("name", "phrase"),
    [
        ("owl", "an owl"),
        ("fox", "a fox"),
        ("unicorn", "a unicorn"),
        ("hourglass", "an hourglass"),
        ("ewe", "a ewe"),
        ("cherries", "cherries"),
        ("scissors", "scissors"),
        ("popcorn", "popcorn"),
        ("bookmark tabs", "bookmark tabs"),
        ("two hearts", "two hearts"),
        ("Leo", "Leo"),
        ("Mount Fuji", "Mount Fuji"),
        ("umbrella", "an umbrella"),
        ("SUV", "an SUV"),
        ("UFO", "a UFO"),
        ("MP3 player", "an MP3 player"),
        ("glass of milk", "a glass of milk"),
        ("ice cream", "an ice cream"),
        ("X-ray", "an X-ray"),
    ],
)
def test_articles_follow_sound_and_number(name, phrase):
    assert noun_phrase(name) == phrase


@pytest.mark.parametrize(
    ("claims", "caption"),
    [
        (claims_of(), "a cartoon of an owl on a red background"),
        (claims_of(objects=(replace(OWL, style="old cartoon"),)), "an old cartoon of an owl on a red background"),
        (claims_of("count", count=3), "a cartoon of three copies of an owl on a red background"),
        (claims_of("count", (CHERRIES,), count=2), "a cartoon of two copies of cherries on a red background"),
        (
            claims_of("pair", (OWL, CHERRIES), relation="left of"),
            "a cartoon of an owl to the left of cherries on a red background",
        ),
        (
            claims_of("pair", (CHERRIES, OWL), relation="above"),
            "a cartoon of cherries above an owl on a red background",
        ),
        (
            claims_of(background=Background("gradient", ("orange", "blue"))),
            "a cartoon of an owl on an orange and blue gradient background",
        ),
        (
            claims_of(background=Background("floor", ("orange", "white"))),
            "a cartoon of an owl on an orange floor with a white wall",
        ),
        (replace(claims_of(), style_said=False), "an owl on a red background"),
        (replace(claims_of(), background_said=False), "a cartoon of an owl"),
    ],
)
def test_caption_says_every_claim_that_is_marked_as_said(claims, caption):
    assert caption_of(claims) == caption


def test_different_claims_never_share_a_full_caption():
    scenes = [
        claims_of(objects=(replace(OWL, style=style),), background=background)
        for style in STYLES
        for background in [Background("solid", (colour,)) for colour in COLOURS]
        + [
            Background(kind, (first, second))
            for kind in ("gradient", "floor")
            for first in COLOURS
            for second in COLOURS
            if first != second
        ]
    ]
    assert len({caption_of(scene) for scene in scenes}) == len(scenes)


def concept(code, name, synonyms=()):
    return Concept(code, name, name, "animals-nature", "animal-bird", synonyms, ())


def dropped(settings, count=4000):
    concepts = {OWL.code: concept(OWL.code, "owl", ("night bird",))}
    rng = np.random.default_rng(0)
    return [drop_words(claims_of(), concepts, settings, rng) for _ in range(count)]


def test_words_are_dropped_and_swapped_as_often_as_the_settings_say():
    scenes = dropped(SceneSettings(omit=0.30, swap_label=0.15))
    omitted = np.mean([not (scene.style_said and scene.background_said) for scene in scenes])
    swapped = np.mean([scene.objects[0].name == "night bird" for scene in scenes])
    assert omitted == pytest.approx(0.30, abs=0.03)
    assert swapped == pytest.approx(0.15, abs=0.03)
    assert np.mean([not scene.style_said for scene in scenes]) == pytest.approx(0.15, abs=0.03)
    assert all(scene.style_said or scene.background_said for scene in scenes)


def test_word_drop_out_changes_the_wording_and_never_the_ground_truth():
    for scene in dropped(SceneSettings(omit=1.0, swap_label=1.0), count=50):
        restored = replace(
            scene,
            style_said=True,
            background_said=True,
            objects=tuple(replace(item, name="owl") for item in scene.objects),
        )
        assert restored == claims_of()


def test_no_word_drop_out_leaves_the_caption_whole():
    assert {caption_of(scene) for scene in dropped(SceneSettings(omit=0.0, swap_label=0.0), count=50)} == {
        "a cartoon of an owl on a red background"
    }


def test_a_synonym_stands_for_one_concept_only():
    words = [word.lower() for synonyms in SYNONYMS.values() for word in synonyms]
    assert len(words) == len(set(words))
    names = {NAMES.get(label, label).lower() for label in SYNONYMS} | {name.lower() for name in NAMES.values()}
    assert not names & set(words)
