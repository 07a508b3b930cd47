"""Captions: the wording of a scene's claims."""

from dataclasses import replace

import numpy as np

from training.data.claims import Background, Claims, ObjectClaim
from training.data.concepts import Concept
from training.data.grammar import article, noun_phrase
from training.data.settings import SceneSettings
from training.data.styles import STYLES

COUNT_WORDS = {2: "two", 3: "three", 4: "four"}
_RELATION_WORDS = {"left of": "to the left of", "above": "above"}


def caption_of(claims: Claims) -> str:
    """The caption that says what `claims` marks as said: "a cartoon of an owl on a red background"."""
    subject = _subject(claims)
    if claims.style_said:
        style = STYLES[claims.objects[0].style].phrase
        subject = f"{article(style)} {style} of {subject}"
    return f"{subject} {_background(claims.background)}" if claims.background_said else subject


def _subject(claims: Claims) -> str:
    first = claims.objects[0]
    if claims.kind == "count":
        return f"{COUNT_WORDS[claims.count]} copies of {noun_phrase(first.name)}"
    if claims.relation is None:
        return noun_phrase(first.name)
    return f"{noun_phrase(first.name)} {_RELATION_WORDS[claims.relation]} {noun_phrase(claims.objects[1].name)}"


def _background(background: Background) -> str:
    first, last = background.colours[0], background.colours[-1]
    if background.kind == "solid":
        return f"on {article(first)} {first} background"
    if background.kind == "gradient":
        return f"on {article(first)} {first} and {last} gradient background"
    return f"on {article(first)} {first} floor with {article(last)} {last} wall"


def drop_words(
    claims: Claims, concepts: dict[str, Concept], settings: SceneSettings, rng: np.random.Generator
) -> Claims:
    """Vary the wording, never the scene: leave out style or background, call an object by a synonym.

    Dropping the whole caption for guidance is the target stage's business, not done here.
    """
    claims = _omit(claims, settings, rng)
    if rng.random() >= settings.swap_label:
        return claims
    return replace(claims, objects=tuple(_swap(item, concepts[item.code], rng) for item in claims.objects))


def _omit(claims: Claims, settings: SceneSettings, rng: np.random.Generator) -> Claims:
    if rng.random() >= settings.omit:
        return claims
    if rng.random() < 0.5:
        return replace(claims, style_said=False)
    return replace(claims, background_said=False)


def _swap(item: ObjectClaim, concept: Concept, rng: np.random.Generator) -> ObjectClaim:
    if not concept.synonyms:
        return item
    return replace(item, name=concept.synonyms[int(rng.integers(len(concept.synonyms)))])
