"""`sd`: the device drafts, the target judges every drafted token in one pass; a rejection truncates the draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cloud.acceptance import Judgement, Lossless, judge_block, judge_chain, judge_coupled
from cloud.relaxation import tv_cost
from cloud.session import Session, Work
from shared.sampling import probabilities

__all__ = ["JUDGES", "verify"]


def verify(session: Session) -> Work:
    """Judges drafts until the picture is complete."""
    assert session.request.rule is not None
    judge = JUDGES.get(session.request.rule.name, _chain)
    yield from session.prefill()
    while not session.complete:
        draft = yield from session.next_draft()
        rows = yield from session.target_rows(draft.ids)
        session.settle(draft, judge(session, draft.ids, rows), rows)


def _coupled(session: Session, tokens: Sequence[int], rows: Tensor) -> Judgement:
    return judge_coupled(rows, session.gumbel(session.position, len(rows)), tokens, _bonus(session, tokens, rows))


def _chain(session: Session, tokens: Sequence[int], rows: Tensor) -> Judgement:
    """Token by token, with any rule that judges single tokens."""
    rule = session.acceptance
    assert rule is not None
    accept, resample = session.judging(len(rows))
    draft, target = session.draft_probs(tokens), probabilities(rows)
    judgement = judge_chain(rule, draft, target, tokens, accept, resample, _bonus(session, tokens, rows))
    if isinstance(rule, Lossless):
        return judgement
    seen = min(judgement.accepted + 1, len(tokens))
    drawn = torch.tensor(tokens[: judgement.accepted], dtype=torch.long, device=target.device)
    strict = Lossless()(draft[: len(drawn)], target[: len(drawn)], drawn).tolist()
    cost = tv_cost(rule, draft[:seen], target[:seen])
    return replace(
        judgement,
        relaxed=tuple(place for place, chance in enumerate(strict) if accept[place] >= chance),
        tv_cost=None if cost is None else float(cost.sum()),
    )


def _block(session: Session, tokens: Sequence[int], rows: Tensor) -> Judgement:
    accept, resample = session.judging(len(rows))
    draft, target = session.draft_probs(tokens), probabilities(rows)
    return judge_block(draft, target, tokens, accept, resample, _bonus(session, tokens, rows))


def _bonus(session: Session, tokens: Sequence[int], rows: Tensor) -> bool:
    """A draft that ends the picture has no token behind it; a device that drafts on ahead wants none."""
    return session.request.bonus and len(rows) > len(tokens)


JUDGES: dict[str, Callable[[Session, Sequence[int], Tensor], Judgement]] = {
    "gumbel": _coupled,
    "block": _block,
}
"""How rules judge a draft that do not judge its tokens one by one."""
