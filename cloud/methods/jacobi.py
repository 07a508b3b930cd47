"""`sjd`, `csd`: the target drafts for itself. A window of tokens is refined in every pass, and its head is committed.

The rows of one pass are the proposals of the next: a token behind the committed ones was drawn from the row the target
gave it last time (or from the law it entered the window with), and is tested against the row it has now (SJD
2410.01699; continuing behind a rejection: SCD; methods.md 1.3, 7.1, 7.3). With the lossless rule the picture follows
the target's law exactly; with shared Gumbel noise it even equals `ar` of the same seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cloud.acceptance import AcceptanceRule, Lossless, coupled_sample, inverse_samples, residual
from cloud.relaxation import entropy, tv_cost
from cloud.session import Session, Work
from protos import ciar_pb2 as pb
from shared.noise import Purpose
from shared.sampling import probabilities
from shared.transcript import Provenance

__all__ = ["decode_window"]

_LOSSLESS = Lossless()


@dataclass(slots=True)
class _Window:
    """Drafted tokens behind the committed ones, each with the law (V,) it was drawn from."""

    tokens: list[int] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)

    def add(self, token: int, law: Tensor) -> None:
        self.tokens.append(token)
        self.laws.append(law)


@dataclass(frozen=True, slots=True)
class _Step:
    """What a pass decided: tokens to commit (the last replaces a rejected draft, if any was), and the next window.

    `stale`: keys and values at the last token's place belong to the draft that it replaced.
    """

    tokens: list[int]
    provenance: list[Provenance]
    stale: bool
    window: _Window
    tv_cost: float | None = 0.0


@dataclass(slots=True)
class _Outbox:
    """Committed tokens that the device has not got yet."""

    start: int
    provenance: list[Provenance] = field(default_factory=list)
    entropy: bytearray = field(default_factory=bytearray)
    tv_cost: float | None = 0.0


def decode_window(session: Session) -> Work:
    """Refines windows until the picture is complete; sends tokens whenever a row of them is."""
    assert session.request.rule is not None
    step = _coupled if session.request.rule.name == "gumbel" else _tested
    yield from session.prefill()
    window, outbox, grid = _Window(), _Outbox(session.position), session.transcript.grid
    while not session.complete:
        _fill(session, window)
        rows = yield from session.target_rows(window.tokens)
        target = probabilities(rows)
        decided = step(session, window, rows, target)
        _commit(session, decided)
        _note(outbox, decided, target)
        window = decided.window
        session.epoch += 1  # draws of the next pass are others
        if session.complete or session.position // grid.cols > outbox.start // grid.cols:
            _send(session, outbox)
            outbox = _Outbox(session.position)


# -- a pass ---------------------------------------------------------------------------------------------------------


def _coupled(session: Session, window: _Window, rows: Tensor, target: Tensor) -> _Step:
    """Draws every place with the picture's own noise; what equals the draft is settled."""
    own = coupled_sample(rows, session.gumbel(session.position, len(rows))).tolist()
    right = next((i for i, token in enumerate(window.tokens) if token != own[i]), len(window.tokens))
    stop = min(right + 1, len(own))
    behind = _Window(own[stop:], list(rows[stop:]))  # the laws are never looked at
    return _Step(own[:stop], [Provenance.SAMPLED] * stop, right < len(window.tokens), behind)


def _tested(session: Session, window: _Window, rows: Tensor, target: Tensor) -> _Step:
    """Tests every draft against its new row."""
    rule, settings, count = session.acceptance, session.request.window, len(window.tokens)
    assert rule is not None
    assert settings is not None
    draft = torch.stack(window.laws) if count else target[:0]
    tokens = torch.tensor(window.tokens, dtype=torch.long, device=target.device)
    uniforms, resample = session.judging(len(rows))
    accept = torch.tensor(uniforms[:count], device=target.device)
    strictly = (accept < _LOSSLESS(draft, target[:count], tokens)).tolist()
    stands = (accept < rule(draft, target[:count], tokens)).tolist()
    head = stands.index(False) if False in stands else count  # drafts in front of the first rejection
    going_on = settings.after == "continue"
    laws = _replacements(rule, draft, target, tokens, head, going_on)
    replaced = inverse_samples(laws, resample)
    behind = _Window()
    for place in range(head + 1, len(rows)):
        # Only the lossless test keeps a draft there: what a relaxed rule lets pass is no sample of the row.
        keeps = going_on and place < count and strictly[place]
        behind.add(window.tokens[place] if keeps else replaced[place], target[place])
    last = replaced[head : head + 1]
    kinds = [Provenance.SAMPLED if strict else Provenance.RELAXED for strict in strictly[:head]]
    cost = tv_cost(rule, draft[: head + 1], target[: min(head + 1, count)])
    return _Step(
        window.tokens[:head] + last,
        kinds + [Provenance.SAMPLED] * len(last),
        head < count,
        behind,
        None if cost is None else float(cost.sum()),
    )


def _replacements(
    rule: AcceptanceRule, draft: Tensor, target: Tensor, tokens: Tensor, head: int, going_on: bool
) -> Tensor:
    """What each place is drawn from if its draft does not stand: (rows, V).

    The first rejection leaves the rule's residual, those behind it the lossless one. A loop that stops at the first
    draws the rest from the target, as every loop does at places without a draft.
    """
    laws, count = target.clone(), len(tokens)
    if head < count:
        laws[head] = rule.resample(draft[head], target[head], tokens[head])
    if going_on:
        laws[head + 1 : count] = residual(draft[head + 1 :], target[head + 1 : count])
    return laws


def _commit(session: Session, step: _Step) -> None:
    whole = step.tokens[:-1] if step.stale else step.tokens
    session.commit(whole, step.provenance[: len(whole)])
    if step.stale:
        session.commit(step.tokens[-1:], step.provenance[-1:])


# -- tokens that enter the window -----------------------------------------------------------------------------------


def _fill(session: Session, window: _Window) -> None:
    """Fills the window up to its size, or to the end of the picture."""
    settings, size = session.request.window, session.transcript.grid.size
    assert settings is not None
    while len(window.tokens) < settings.size - 1 and session.position + len(window.tokens) < size:
        window.add(*_entering(session, window))


def _entering(session: Session, window: _Window) -> tuple[int, Tensor]:
    """A token for the next place of the window, and the law it was drawn from."""
    settings, vocabulary = session.request.window, session.transcript.vocabulary
    assert settings is not None
    position = session.position + len(window.tokens)
    device = session.engine.device
    coin = session.uniforms(Purpose.DRAFT, position, 1)[0]
    if settings.init == "drafter":
        law = session.draft_probs([*window.tokens, 0])[-1]
        return inverse_samples(law.unsqueeze(0), [coin])[0], law
    neighbours = _neighbours(session, window, position, settings.init)
    if not neighbours:
        return min(int(coin * vocabulary), vocabulary - 1), torch.full((vocabulary,), 1.0 / vocabulary, device=device)
    law = torch.zeros(vocabulary, device=device)
    for token in neighbours:
        law[token] += 1.0 / len(neighbours)
    return neighbours[int(coin * len(neighbours))], law


def _neighbours(session: Session, window: _Window, position: int, init: str) -> list[int]:
    """The tokens that `init` copies, as far as the grid has them; on the first row the left one stands for both."""
    grid = session.transcript.grid
    tokens = session.transcript.tokens + window.tokens
    left = [tokens[position - 1]] if position else []
    above = grid.above(position)
    over = [tokens[above]] if above is not None else left
    return {"uniform": [], "left": left, "above": over, "mix": left + over}[init]


# -- messages -------------------------------------------------------------------------------------------------------


def _note(outbox: _Outbox, step: _Step, target: Tensor) -> None:
    outbox.provenance += step.provenance
    share = entropy(target[: len(step.tokens)]) / math.log(target.shape[-1])
    outbox.entropy += bytes((share.clamp(0.0, 1.0) * 255).round().to(torch.uint8).tolist())
    known = outbox.tv_cost is not None and step.tv_cost is not None
    outbox.tv_cost = outbox.tv_cost + step.tv_cost if known else None  # type: ignore[operator]


def _send(session: Session, outbox: _Outbox) -> None:
    tokens = pb.Tokens(
        start=outbox.start,
        ids=session.transcript.since(outbox.start),
        cost=session.cost.taken(),
        provenance=bytes(outbox.provenance),
        entropy=bytes(outbox.entropy),
        tv_cost=outbox.tv_cost,
    )
    session.emit(pb.CloudMessage(tokens=tokens))
