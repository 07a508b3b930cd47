"""Solo: the device draws the picture, or what is left of it, alone."""

from __future__ import annotations

from device.generation import Generation
from shared.transcript import Provenance

__all__ = ["draw_alone", "finish_alone"]


def draw_alone(generation: Generation) -> None:
    """Draws every token from the drafter."""
    _draw(generation, Provenance.KEPT)


def finish_alone(generation: Generation) -> None:
    """Draws what is missing because the link was lost; such tokens are marked as degraded."""
    _draw(generation, Provenance.DEGRADED)


def _draw(generation: Generation, provenance: Provenance) -> None:
    cache = generation.models.drafter()
    with generation.clock("draft"):
        features = generation.models.captions.encode(generation.prompt)
        rows = cache.prefill(features, generation.transcript.tokens)
    while not generation.transcript.complete:
        with generation.clock("draft"):
            token = generation.draw(len(generation.transcript), generation.draft_row(rows.centre[-1]))
        generation.commit([token], provenance)
        if not generation.transcript.complete:
            with generation.clock("draft"):
                rows = cache.feed([token])
