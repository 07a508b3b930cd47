"""`sd`: the device drafts, the target judges every drafted token in one pass; a rejection truncates the draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from cloud.acceptance import Judgement, Lossless, judge_block, judge_chain, judge_coupled
from cloud.session import Session, Work
from shared.noise import Purpose
from shared.sampling import probabilities

__all__ = ["JUDGES", "verify"]


def verify(session: Session) -> Work:
    """Judges drafts until the picture is complete."""
    assert session.request.rule is not None
    judge = JUDGES[session.request.rule.name]
    yield from session.prefill()
    while not session.complete:
        draft = yield from session.next_draft()
        rows = yield from session.target_rows(draft.ids)
        session.settle(draft, judge(session, draft.ids, rows), rows)


def _coupled(session: Session, tokens: Sequence[int], rows: Tensor) -> Judgement:
    return judge_coupled(rows, session.gumbel(session.position, len(rows)), tokens, _bonus(session, tokens, rows))


def _chain(session: Session, tokens: Sequence[int], rows: Tensor) -> Judgement:
    accept, resample = _uniforms(session, rows)
    draft, target = session.draft_probs(tokens), probabilities(rows)
    return judge_chain(Lossless(), draft, target, tokens, accept, resample, _bonus(session, tokens, rows))


def _block(session: Session, tokens: Sequence[int], rows: Tensor) -> Judgement:
    accept, resample = _uniforms(session, rows)
    draft, target = session.draft_probs(tokens), probabilities(rows)
    return judge_block(draft, target, tokens, accept, resample, _bonus(session, tokens, rows))


def _bonus(session: Session, tokens: Sequence[int], rows: Tensor) -> bool:
    """A draft that ends the picture has no token behind it; a device that drafts on ahead wants none."""
    return session.request.bonus and len(rows) > len(tokens)


def _uniforms(session: Session, rows: Tensor) -> tuple[list[float], list[float]]:
    start, count = session.position, len(rows)
    return session.uniforms(Purpose.ACCEPT, start, count), session.uniforms(Purpose.RESIDUAL, start, count)


JUDGES: dict[str, Callable[[Session, Sequence[int], Tensor], Judgement]] = {
    "gumbel": _coupled,
    "mrs": _chain,
    "block": _block,
}
"""How each acceptance rule judges a draft."""
