"""One generation on the verifier: its transcript, its place in the cache, and what a method may do with them.

A method is a generator that the scheduler drives on the engine's thread: it yields a `Feed` and gets `Rows`, or yields
`AWAIT_DRAFT` and gets the device's next draft. The helpers here do the yielding, so a method reads like its page.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cloud.acceptance import AcceptanceRule, Judgement
from cloud.engine import Caption, Engine, Feed
from cloud.kv_cache import Sequence
from cloud.models.transformer import Rows
from cloud.shadow_drafter import ShadowDrafter
from protos import ciar_pb2 as pb
from shared import noise
from shared.errors import ProtocolError
from shared.methods import Method, Rule, law
from shared.noise import Purpose
from shared.sampling import SamplingSettings, guide, warp
from shared.transcript import Provenance, Transcript, check_ids
from shared.windows import WindowSettings

__all__ = ["AWAIT_DRAFT", "Adapt", "Cost", "Request", "Selective", "Session", "Work"]


class _AwaitDraft:
    """Yielded by a method that needs the device's next draft."""


AWAIT_DRAFT = _AwaitDraft()

Work = Generator[Feed | _AwaitDraft, Any, None]

Adapt = Callable[[np.ndarray[Any, np.dtype[np.float32]]], Tensor]
"""Turns interval features (n, width) into vectors (n, dim) for the target."""


@dataclass(frozen=True, slots=True)
class Selective:
    """What a device that keeps tokens asked for, checked.

    Args:
        prefix: tokens that the cloud samples first.
        feature_mode: what comes with kept tokens.
        features: features (n, width) of the transcript's kept tokens, in order.
        local_repair: correct failed tokens in place and keep the rest.
        audit: share of the kept tokens whose target probability is sent back.
    """

    prefix: int
    feature_mode: str
    features: np.ndarray[Any, np.dtype[np.float32]]
    local_repair: bool
    audit: float


@dataclass(frozen=True, slots=True)
class Request:
    """What a device asked for, checked.

    Args:
        generation: name of the picture in logs; the same after a resume.
        features: caption features (length, caption_dim), float32.
        transcript: tokens committed so far; the session goes on behind them.
        method, rule: how the work is split; rule is None where nothing is judged.
        sampling: the warp.
        seed: names all noise of the picture.
        epoch: of the first draft.
        bonus: whether a fully accepted draft gets the token behind it.
        selective: set for methods whose device keeps tokens.
        rule_options: numbers of the rule.
        window: set for window decoders.
    """

    generation: str
    features: np.ndarray[Any, np.dtype[np.float32]]
    transcript: Transcript
    method: Method
    rule: Rule | None
    sampling: SamplingSettings
    seed: int
    epoch: int = 0
    bonus: bool = True
    selective: Selective | None = None
    rule_options: Mapping[str, float] = field(default_factory=dict)
    window: WindowSettings | None = None


@dataclass(slots=True)
class Cost:
    """What a generation spent on the cloud: passes it took part in, its rows in them, seconds of those passes."""

    forwards: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, forwards: int, tokens: int, seconds: float) -> None:
        self.forwards += forwards
        self.tokens += tokens
        self.seconds += seconds

    def taken(self) -> pb.Cost:
        """The cost since the last call, as a message; starts again from zero."""
        message = pb.Cost(forwards=self.forwards, tokens=self.tokens, microseconds=round(self.seconds * 1e6))
        self.forwards, self.tokens, self.seconds = 0, 0, 0.0
        return message


@dataclass(slots=True)
class Session:
    """A generation in progress. Used on the engine's thread only.

    Args:
        engine: runs the target.
        request: what was asked.
        emit: sends a message to the device; called on the engine's thread.
        shadow: recomputes draft rows, for rules that need them.
        adapt: makes vectors of interval features, for methods whose device sends them.
        acceptance: the rule of single tokens in use; None for rules of another kind.
    """

    engine: Engine
    request: Request
    emit: Callable[[pb.CloudMessage], None]
    shadow: ShadowDrafter | None = None
    adapt: Adapt | None = None
    acceptance: AcceptanceRule | None = None
    cost: Cost = field(default_factory=Cost)
    stale_drafts: int = 0
    epoch: int = field(init=False)
    transcript: Transcript = field(init=False)
    sequence: Sequence = field(init=False)
    _drafts: deque[pb.Draft] = field(default_factory=deque)
    _next_row: Tensor | None = None
    _noise: dict[int, Tensor] = field(default_factory=dict)
    _added: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.epoch = self.request.epoch
        self.transcript = self.request.transcript
        self.sequence = self.engine.cache.allocate(guided=self.request.sampling.guidance != 1.0)
        if self.request.selective is not None:
            kept = [i for i, kind in enumerate(self.transcript.provenance) if kind == Provenance.KEPT]
            self.add_features(kept, self.request.selective.features)

    @property
    def position(self) -> int:
        """Next position to be committed."""
        return len(self.transcript)

    @property
    def complete(self) -> bool:
        return self.transcript.complete

    def close(self) -> None:
        """Gives the slot back."""
        self.engine.cache.release(self.sequence)

    # -- the target -------------------------------------------------------------------------------------------------

    def prefill(self) -> Work:
        """Feeds the caption and the transcript in one pass; a resumed picture is rebuilt here."""
        tokens = self.transcript.tokens
        if not self.complete:
            caption = Caption(torch.from_numpy(self.request.features))
            rows = yield Feed(self.sequence, tokens, caption, self._added_to(0, len(tokens)))
            self._next_row = self._warped(rows)[0]
        self.emit(
            pb.CloudMessage(
                opened=pb.Opened(
                    position=self.position, cost=self.cost.taken(), law=law(self.request.method, self.request.rule)
                )
            )
        )

    def target_rows(self, draft: List[int], behind: bool = True) -> Generator[Feed, Any, Tensor]:
        """Warped log-probabilities of the next position and of the one behind each drafted token.

        Args:
            draft: n drafted ids for the positions from `position` on.
            behind: whether the row behind the last drafted token is wanted; if not, that token is not fed.

        Returns:
            (n + 1, V); (n, V) without the row behind, or when the draft ends the picture.
        """
        unfed = self.transcript.since(self._fed)
        ends = self.position + len(draft) == self.transcript.grid.size
        feed = unfed + list(draft if behind and not ends else draft[:-1])
        known = [] if unfed else [self._known_row()]
        if feed:
            added = self._added_to(self._fed, len(feed))
            rows = yield Feed(self.sequence, feed, None, added, len(feed) - max(0, len(unfed) - 1))
            known.append(self._warped(rows))
        return known[0] if len(known) == 1 else torch.cat(known)

    def reread_rows(self, draft: List[int], place: int) -> Generator[Feed, Any, Tensor]:
        """The rows of `target_rows` behind a place, once tokens of the draft have changed from there on.

        Returns:
            (n - 1 - place, V): of the places behind `place`.
        """
        start = self.position + place
        self.roll_back(start)
        feed = draft[place:-1]
        rows = yield Feed(self.sequence, feed, None, self._added_to(start, len(feed)), len(feed))
        return self._warped(rows)

    def _known_row(self) -> Tensor:
        if self._next_row is None:
            raise RuntimeError("the row of the next position is neither known nor computable: a token was fed twice")
        return self._next_row.unsqueeze(0)

    @property
    def _fed(self) -> int:
        return self.sequence.length - self.engine.config.prefix_rows

    def _warped(self, rows: Rows) -> Tensor:
        logits = rows.logits
        if logits.shape[0] == 2:
            return warp(guide(logits[0], logits[1], self.request.sampling.guidance), self.request.sampling)
        return warp(logits[0], self.request.sampling)

    def add_features(self, positions: List[int], features: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        """Takes interval features (n, width) of tokens kept at n positions, for whenever those tokens are fed."""
        if self.adapt is not None and len(positions):
            self._added.update(zip(positions, self.adapt(features), strict=True))

    def _added_to(self, start: int, count: int) -> Tensor | None:
        """What is added to the embeddings of positions start..start+count-1: (count, dim), or None for nothing."""
        places = [place for place in range(start, start + count) if place in self._added]
        if not places:
            return None
        added = torch.zeros(count, self.engine.config.dim, device=self.engine.device)
        added[[place - start for place in places]] = torch.stack([self._added[place] for place in places])
        return added

    # -- committing -------------------------------------------------------------------------------------------------

    def commit(self, tokens: List[int], provenance: Provenance | List[Provenance], rows: Tensor | None = None) -> None:
        """Commits tokens behind the transcript and rolls the cache back to what is committed.

        Args:
            provenance: one for all tokens, or one for each.
            rows: `target_rows` of a draft that begins at the position where `tokens` begin, when the row behind the
                last committed token is among them and may be needed again.
        """
        self.transcript.extend(tokens, provenance)
        self._next_row = rows[len(tokens)] if rows is not None and len(rows) > len(tokens) else None
        self.roll_back(self.position)
        # Features of a draft's tokens that were not committed must not reach others at the same place.
        self._added = {place: vector for place, vector in self._added.items() if place < self.position}

    def roll_back(self, position: int) -> None:
        """Forgets keys and values from `position` on; committed tokens there are fed again with the next rows."""
        if self._fed > position:
            self.sequence.truncate(self.engine.config.prefix_rows + position)

    def settle(self, draft: pb.Draft, judgement: Judgement, rows: Tensor) -> None:
        """Commits what a judgement says of a draft and tells the device."""
        accepted, rejected = judgement.accepted, judgement.accepted < len(draft.ids)
        kinds = [Provenance.RELAXED if i in judgement.relaxed else Provenance.VERIFIED for i in range(accepted)]
        self.commit(draft.ids[:accepted], kinds, rows)
        if judgement.token is not None:
            self.commit([judgement.token], Provenance.CORRECTED if rejected else Provenance.SAMPLED)
        self.epoch += rejected
        verdict = pb.Verdict(
            epoch=draft.epoch,
            start=draft.start,
            accepted=accepted,
            token=judgement.token,
            cost=self.cost.taken(),
            relaxed=judgement.relaxed,
            tv_cost=judgement.tv_cost,
        )
        self.emit(pb.CloudMessage(verdict=verdict))

    def send_tokens(self, start: int) -> None:
        """Sends the tokens committed from `start` on to a viewer."""
        tokens = pb.Tokens(start=start, ids=self.transcript.since(start), cost=self.cost.taken())
        self.emit(pb.CloudMessage(tokens=tokens))

    # -- drafts -----------------------------------------------------------------------------------------------------

    def deliver(self, draft: pb.Draft) -> None:
        """Takes a draft from the device."""
        self._drafts.append(draft)

    @property
    def has_draft(self) -> bool:
        return bool(self._drafts)

    def next_draft(self) -> Generator[_AwaitDraft, Any, pb.Draft]:
        """Waits for a draft that continues the transcript; old and repeated ones are dropped and counted.

        Raises:
            ProtocolError: a draft leaves a gap, is too long, is empty, or holds an id outside the vocabulary.
        """
        while True:
            while not self._drafts:
                yield AWAIT_DRAFT
            draft = self._drafts.popleft()
            if draft.epoch == self.epoch + 1 and self.request.selective and self.request.selective.local_repair:
                self._retract(draft.start)
            if any(later.epoch > draft.epoch and later.start <= draft.start for later in self._drafts):
                self.stale_drafts += 1
                continue
            if draft.epoch < self.epoch or (draft.epoch == self.epoch and draft.start < self.position):
                self.stale_drafts += 1
                continue
            self._check(draft)
            return draft

    def _retract(self, start: int) -> None:
        """Takes back what was judged from `start` on: the device has drawn it again behind a repair it had not seen.

        Raises:
            ProtocolError: `start` lies in the prefix, or behind what was judged.
        """
        assert self.request.selective is not None
        first = max(1, self.request.selective.prefix)
        if not first <= start <= self.position:
            raise ProtocolError(
                f"an epoch begins at position {start}, but only {first}..{self.position} may be drawn again"
            )
        self.transcript.truncate(start)
        self.epoch += 1
        # The row of the next position is that behind the last token, which is read again for it.
        self._next_row = None
        self.roll_back(start - 1)
        self._added = {place: vector for place, vector in self._added.items() if place < start}

    def _check(self, draft: pb.Draft) -> None:
        if draft.epoch != self.epoch:
            raise ProtocolError(f"draft of epoch {draft.epoch}, but epoch {self.epoch} is current")
        if draft.start != self.position:
            raise ProtocolError(f"draft starts at position {draft.start}, but {self.position} is next: out of order")
        if not draft.ids:
            raise ProtocolError(f"draft at position {draft.start} holds no tokens")
        if draft.start + len(draft.ids) > self.transcript.grid.size:
            raise ProtocolError(
                f"draft of {len(draft.ids)} tokens at position {draft.start} exceeds the {self.transcript.grid} grid"
            )
        check_ids(draft.ids, draft.start, self.transcript.vocabulary)

    def draft_probs(self, tokens: List[int]) -> Tensor:
        """The device's warped draft rows (n, V) for n drafted tokens, recomputed by the shadow drafter."""
        if self.shadow is None:
            raise RuntimeError(f"rule {self.request.rule} needs a shadow drafter")
        return torch.from_numpy(self.shadow.probs(self.transcript.tokens, tokens)).to(self.engine.device)

    # -- noise ------------------------------------------------------------------------------------------------------

    def gumbel(self, start: int, count: int) -> Tensor:
        """The picture's shared Gumbel noise at positions start..start+count-1: (count, V)."""
        cols = self.transcript.grid.cols
        rows = {position // cols for position in range(start, start + count)}
        self._noise = {row: self._noise[row] if row in self._noise else self._noise_row(row) for row in sorted(rows)}
        joined = torch.cat(list(self._noise.values()))
        first = start - min(rows) * cols
        return joined[first : first + count]

    def _noise_row(self, row: int) -> Tensor:
        cols = self.transcript.grid.cols
        positions = range(row * cols, (row + 1) * cols)
        on_cpu = self.engine.device.type == "cpu"
        draws = noise.gumbel(
            self.request.seed,
            Purpose.TOKEN,
            positions,
            self.transcript.vocabulary,
            xp=np if on_cpu else torch,
            device=None if on_cpu else self.engine.device,
        )
        return torch.from_numpy(draws) if on_cpu else draws

    def judging(self, count: int) -> tuple[list[float], list[float]]:
        """Fresh uniforms for the next `count` positions: to accept by, and to draw replacements by."""
        return self.uniforms(Purpose.ACCEPT, self.position, count), self.uniforms(
            Purpose.RESIDUAL, self.position, count
        )

    def uniforms(self, purpose: Purpose, start: int, count: int) -> list[float]:
        """Fresh uniforms for positions start..start+count-1 at this attempt: keyed by the epoch as well."""
        draws = noise.uniform(self.request.seed, purpose, range(start, start + count), 1, round=self.epoch)
        result: list[float] = draws[:, 0].tolist()
        return result
