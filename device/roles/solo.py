"""Solo: the device draws the whole picture alone."""

from __future__ import annotations

from device.generation import Generation
from shared.transcript import Provenance

__all__ = ["draw_alone"]


def draw_alone(generation: Generation) -> None:
    """Draws every token from the drafter."""
    cache = generation.models.drafter()
    with generation.clock("draft"):
        features = generation.models.captions.encode(generation.prompt)
        rows = cache.prefill(features)
    while not generation.transcript.complete:
        with generation.clock("draft"):
            token = generation.draw(len(generation.transcript), generation.draft_row(rows.centre[-1]))
        generation.commit([token], Provenance.KEPT)
        if not generation.transcript.complete:
            with generation.clock("draft"):
                rows = cache.feed([token])
