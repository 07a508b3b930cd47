"""What a reader of the tables has to know."""

from __future__ import annotations

from training.evaluation.measures import Figures
from training.evaluation.prompts import PromptList
from training.evaluation.recogniser import Recogniser

__all__ = ["notes_on"]


def notes_on(prompts: PromptList, rows: dict[str, Figures], recogniser: Recogniser | None) -> list[str]:
    """Sentences to print below a list's table."""
    count = len(prompts.captions)
    notes = [
        f"Frechet: EfficientNet-lite0 features (1280) of {count} pictures against {len(prompts.reference)} other real "
        "pictures; the row 'real' is the floor. Comparable only at the same n, data and feature size."
    ]
    if prompts.claims is None:
        notes.append(
            "Only the Frechet distance: retrieval and background colours need to know what a picture claims to show, "
            "which composed scenes do and your own pictures do not."
        )
    if recogniser is not None and prompts.single:
        asked = {claims.objects[0].code for claims in prompts.claims or ()}
        notes.append(
            f"R@k: the asked concept among {len(recogniser.names)} (chance R@1 {1 / len(recogniser.names):.1%}); "
            f"{len(asked)} concepts are asked for. The recogniser was fitted on the train drawings: real val and test "
            "drawings are new to it, so a model that draws as in training may pass the row 'real'; the list 'train' "
            "shows the score of drawings it knows."
        )
    concurrency = sorted({number for row in rows.values() if row.cost for number in row.cost.concurrency})
    if concurrency:
        notes.append(f"s a picture: wall time with {' and '.join(map(str, concurrency))} pictures drawn at once.")
    return notes
