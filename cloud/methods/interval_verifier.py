"""`ciar`: the device keeps what it is sure of; the target judges the tokens marked uncertain (CIAR 2603.25463).

Kept tokens are fed with their interval features and never judged. So the picture follows the mixed law: at a kept
position the draft row, at an uncertain one the target's. Every rule of `sd` is exact for that law, because the row a
kept token is judged by is the draft's own: it always stands.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cloud.acceptance import Judgement, Lossless, coupled_sample, inverse_sample, judge_block, judge_chain
from cloud.engine import Feed
from cloud.methods.sampler import sample_ahead
from cloud.session import Session, Work
from protos import ciar_pb2 as pb
from shared.audit import audited
from shared.errors import ProtocolError
from shared.features import unpack
from shared.sampling import probabilities
from shared.transcript import Provenance

__all__ = ["verify_uncertain"]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A draft with its marks: which tokens shall be judged, and which kept ones are audited."""

    draft: pb.Draft
    uncertain: list[bool]
    audited: list[bool]

    @property
    def tokens(self) -> Sequence[int]:
        return self.draft.ids

    @property
    def provenance(self) -> list[Provenance]:
        return [Provenance.VERIFIED if mark else Provenance.KEPT for mark in self.uncertain]


@dataclass(frozen=True, slots=True)
class _Repair:
    """A draft with its failures replaced, the rows it was judged by at last, and how far the target has read it so."""

    tokens: list[int]
    rows: Tensor
    read: int


def verify_uncertain(session: Session) -> Work:
    """Samples the prefix, then judges the uncertain tokens of drafts until the picture is complete."""
    selective = session.request.selective
    assert selective is not None
    yield from session.prefill()
    yield from sample_ahead(session, selective.prefix)
    while not session.complete:
        chunk = _marked(session, (yield from session.next_draft()))
        rows = None
        if any(chunk.uncertain) or any(chunk.audited):
            rows = yield from session.target_rows(chunk.tokens, behind=False)
        if rows is not None and any(chunk.uncertain) and selective.local_repair:
            repair = yield from _repaired(session, chunk, rows)
            _settle(session, chunk, repair.rows, repair)
        else:
            _settle(session, chunk, rows)


def _marked(session: Session, draft: pb.Draft) -> _Chunk:
    """Checks marks and features of a draft and takes the features in.

    Raises:
        ProtocolError: there are not as many marks or features as tokens.
    """
    selective, count = session.request.selective, len(draft.ids)
    assert selective is not None
    if len(draft.uncertain) != (count + 7) // 8:
        raise ProtocolError(
            f"draft at position {draft.start}: {count} tokens, but {len(draft.uncertain)} bytes of marks"
        )
    uncertain = [bool(draft.uncertain[i // 8] >> (i % 8) & 1) for i in range(count)]
    kept = [draft.start + i for i, mark in enumerate(uncertain) if not mark]
    session.add_features(kept, unpack(selective.feature_mode, draft.features, len(kept), session.engine.config.dim))
    chosen = audited(session.request.seed, range(draft.start, draft.start + count), selective.audit)
    return _Chunk(draft, uncertain, [pick and not mark for pick, mark in zip(chosen, uncertain, strict=True)])


def _settle(session: Session, chunk: _Chunk, rows: Tensor | None, repair: _Repair | None = None) -> None:
    """Judges, commits, and tells the device."""
    draft = chunk.draft
    verdict = pb.Verdict(epoch=draft.epoch, start=draft.start, accepted=len(draft.ids))
    if rows is not None:
        verdict.audited.extend(rows[i, draft.ids[i]].item() for i, pick in enumerate(chunk.audited) if pick)
    if repair is not None:
        _commit_repair(session, chunk, repair, verdict)
    elif rows is None or not any(chunk.uncertain):
        session.commit(draft.ids, chunk.provenance)
    else:
        _truncate(session, chunk, rows, verdict)
    verdict.cost.CopyFrom(session.cost.taken())
    session.emit(pb.CloudMessage(verdict=verdict))


def _truncate(session: Session, chunk: _Chunk, rows: Tensor, verdict: pb.Verdict) -> None:
    """Keeps the draft up to the first token that fails, which is replaced."""
    assert session.request.rule is not None
    judgement = _JUDGES[session.request.rule.name](session, chunk, rows)
    accepted = verdict.accepted = judgement.accepted
    session.commit(chunk.tokens[:accepted], chunk.provenance[:accepted], rows)
    # What is audited behind the first failure was never committed.
    del verdict.audited[sum(chunk.audited[:accepted]) :]
    if judgement.token is not None:
        session.commit([judgement.token], Provenance.CORRECTED)
        verdict.token = judgement.token
        session.epoch += 1


def _commit_repair(session: Session, chunk: _Chunk, repair: _Repair, verdict: pb.Verdict) -> None:
    """Keeps the draft with every failure replaced."""
    kinds = chunk.provenance
    replaced = [place for place, token in enumerate(chunk.tokens) if repair.tokens[place] != token]
    for place in replaced:
        kinds[place] = Provenance.CORRECTED
    session.commit(repair.tokens, kinds)
    session.roll_back(chunk.draft.start + repair.read)
    verdict.corrected.extend(replaced)
    verdict.replacements.extend(repair.tokens[place] for place in replaced)


def _repaired(session: Session, chunk: _Chunk, rows: Tensor) -> Generator[Feed, Any, _Repair]:
    """Replaces what fails and keeps the rest: one round trip, approximate.

    With the shared noise a replacement is the target's own sample, so the uncertain tokens behind it are judged anew,
    by rows that have read it, until all of them are the target's samples behind one another: what stays approximate
    are the kept tokens between them, which were drawn without the replacements. A pass settles a failure at least, most
    often all.
    """
    assert session.request.rule is not None
    tokens, places = list(chunk.tokens), [place for place, mark in enumerate(chunk.uncertain) if mark]
    if session.request.rule.name != "gumbel":
        replaced = _failures(session, chunk, rows)
        for place, token in replaced.items():
            tokens[place] = token
        return _Repair(tokens, rows, min(replaced, default=len(tokens)))
    shared = session.gumbel(chunk.draft.start, len(rows))
    while True:
        own = coupled_sample(rows, shared).tolist()
        failed = [place for place in places if own[place] != tokens[place]]
        for place in failed:
            tokens[place] = own[place]
        if not failed or failed[0] == places[-1]:
            return _Repair(tokens, rows, min(failed, default=len(tokens)))
        rows = torch.cat([rows[: failed[0] + 1], (yield from session.reread_rows(tokens, failed[0]))])


def _failures(session: Session, chunk: _Chunk, rows: Tensor) -> dict[int, int]:
    """Places of uncertain tokens that fail on their own, with their replacements."""
    places = [place for place, mark in enumerate(chunk.uncertain) if mark]
    draft, target = session.draft_probs(chunk.tokens), probabilities(rows)
    accept, resample = session.judging(len(rows))
    rule = Lossless()
    drawn = torch.tensor(chunk.tokens, device=target.device)
    chances = rule(draft, target, drawn).tolist()
    return {
        place: inverse_sample(rule.resample(draft[place], target[place], drawn[place]), resample[place])
        for place in places
        if accept[place] >= chances[place]
    }


def _coupled(session: Session, chunk: _Chunk, rows: Tensor) -> Judgement:
    own = coupled_sample(rows, session.gumbel(chunk.draft.start, len(rows))).tolist()
    for place, (mark, token) in enumerate(zip(chunk.uncertain, chunk.tokens, strict=True)):
        if mark and own[place] != token:
            return Judgement(place, own[place])
    return Judgement(len(chunk.tokens), None)


def _chain(session: Session, chunk: _Chunk, rows: Tensor) -> Judgement:
    draft, mixed = _mixed(session, chunk, rows)
    return judge_chain(Lossless(), draft, mixed, chunk.tokens, *session.judging(len(rows)), bonus=False)


def _block(session: Session, chunk: _Chunk, rows: Tensor) -> Judgement:
    draft, mixed = _mixed(session, chunk, rows)
    return judge_block(draft, mixed, chunk.tokens, *session.judging(len(rows)), bonus=False)


def _mixed(session: Session, chunk: _Chunk, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Draft rows, and the rows of the mixed law: the target's where tokens are uncertain, the draft's where kept."""
    draft, target = session.draft_probs(chunk.tokens), probabilities(rows)
    marks = torch.tensor(chunk.uncertain, device=target.device).unsqueeze(-1)
    return draft, torch.where(marks, target, draft.to(target.dtype))


_JUDGES: dict[str, Callable[[Session, _Chunk, Tensor], Judgement]] = {
    "gumbel": _coupled,
    "mrs": _chain,
    "block": _block,
}
