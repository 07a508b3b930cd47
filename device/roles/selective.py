"""The selective drafter of `ciar`: keeps what it is sure of and sends the rest for judgement (methods.md 5.7).

A draft carries kept and uncertain tokens alike, since the target has to read both; only marked ones are judged. The
decision to keep a token is made from its row, before it is drawn.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from device.batching import BatchController
from device.generation import Generation
from device.report import SelectionUse
from device.roles.drafting import DraftingLoop
from protos import ciar_pb2 as pb
from shared import noise
from shared.audit import Audit, audited
from shared.errors import ProtocolError
from shared.features import interval_scalars, pack
from shared.graphs import DraftRows
from shared.intervals import score
from shared.noise import Purpose
from shared.sampling import SamplingSettings, warp
from shared.thresholds import Threshold, make_threshold
from shared.transcript import Provenance

__all__ = ["draft_selectively"]

_PLAIN = SamplingSettings(temperature=1.0, top_k=0, top_p=1.0, guidance=1.0)
_FLIGHTS = 2
"""Drafts in flight when pipelined. A failure most often changes what is drafted behind it, so more are in vain."""


def draft_selectively(generation: Generation) -> None:
    """Draws the picture, asking the cloud for what is uncertain."""
    role = _SelectiveDrafter(generation)
    generation.converse(role.follow, role.finish_alone)
    generation.scores[:] = role.chooser.scores
    selection = generation.selection
    generation.report.selection = SelectionUse(
        mode=selection.mode,
        repair=selection.repair,
        score=selection.score,
        threshold_mode=selection.threshold_mode,
        cloud_budget=selection.cloud_budget,
        prefix=role.prefix,
        features=role.mode,
        batch=role.controller.batch(),
        draft_rows=selection.draft_rows,
    )
    generation.report.selection.count_audit(role.audit)


@dataclass(slots=True)
class _Token:
    """A drafted token with what was decided of it."""

    id: int
    uncertain: bool
    log_prob: float
    feature: bytes

    def drawn_as(self, other: _Token) -> bool:
        """Whether the same was drawn and decided; features may differ in their last digits."""
        return (self.id, self.uncertain) == (other.id, other.uncertain)


@dataclass
class _Chooser:
    """Decides which tokens are uncertain.

    Args:
        generation: the picture.
        threshold: decides position by position.
        first: position of the first decision; what lies before was sampled by the cloud.
        scores: uncertainty (T,), NaN where nothing was decided.
    """

    generation: Generation
    threshold: Threshold
    first: int
    scores: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        self.scores = np.full(self.generation.transcript.grid.size, np.nan)

    def uncertain(self, position: int, rows: DraftRows) -> bool:
        """Decides on the position behind the rows; positions come in order, and those of the prefix are the cloud's."""
        if position < self.first:
            return True
        value = self._score(position, rows)
        self.scores[position] = value
        return self.threshold.uncertain(value)

    def truncate(self, position: int) -> None:
        """Forgets the decisions from `position` on."""
        self.scores[max(position, 0) :] = np.nan
        self.threshold.truncate(max(0, position - self.first))

    def _score(self, position: int, rows: DraftRows) -> float:
        name = self.generation.selection.score
        if name == "random":
            return float(noise.uniform(self.generation.seed, Purpose.SCORE, [position], 1)[0, 0])
        return float(score(name, rows.measures[-1], rows.centre.shape[-1]))


def _threshold(generation: Generation) -> Threshold:
    selection = generation.selection
    grid, mode = generation.transcript.grid, selection.threshold_mode
    budget, level, first = selection.drafted_budget(grid), selection.threshold, selection.prefix(grid)
    if mode == "absolute":
        return make_threshold(mode, budget, level, (), (), ())
    calibration, score_ = generation.models.calibration, selection.score
    counts = [min(grid.cols, max(0, end - first)) for end in range(grid.cols, grid.size + 1, grid.cols)]
    return make_threshold(mode, budget, level, calibration.quantiles(score_), calibration.row_quantiles(score_), counts)


class _SelectiveDrafter(DraftingLoop):
    """Drafts that end at the end of a row of tokens, or of several, or after some uncertain ones."""

    def __init__(self, generation: Generation) -> None:
        selection, models, grid = generation.selection, generation.models, generation.transcript.grid
        with generation.clock("draft"):
            features = models.captions.encode(generation.prompt)
        pipelined = selection.mode == "pipelined"
        in_flight = (generation.in_flight or _FLIGHTS) if pipelined else 1
        cache = models.drafter(detail=True, temperature=generation.sampling.temperature)
        super().__init__(generation, features, cache, in_flight)
        self.mode = generation.feature_mode
        self.encode = models.interval_encoder(self.mode)
        self.prefix = selection.prefix(grid)
        self.band = grid.cols * selection.draft_rows
        self.chooser = _Chooser(generation, _threshold(generation), self.prefix)
        self.controller = BatchController(
            self.band,
            selection.repair == "local",
            1 if selection.mode == "sync" else selection.batch,
            pipelined,
        )
        self.audit = Audit()
        self.drafts: list[list[_Token]] = []

    # -- drafting ---------------------------------------------------------------------------------------------------

    def may_draft(self) -> bool:
        """Not before the prefix is there: the first decision lies behind it."""
        return len(self.generation.transcript) >= self.prefix and super().may_draft() and self.next < self._end

    @property
    def _end(self) -> int:
        """Where the next draft ends at the latest.

        The verifier is done when it has judged the last token, and takes nothing back then. So where a repair may
        change what is in flight, the last rows, those of one draft, wait until nothing is.
        """
        size = self.generation.transcript.grid.size
        waits = bool(self.flying) and self.generation.selection.repair == "local"
        return (size - 1) // self.band * self.band if waits else size

    def propose(self, start: int) -> pb.Draft:
        begun = time.perf_counter()
        tokens = self._draw(start, self.controller.batch())
        uncertain = sum(token.uncertain for token in tokens)
        self.controller.drafted(len(tokens), uncertain, time.perf_counter() - begun)
        self.generation.report.draft.proposed += uncertain
        self.drafts.append(tokens)
        return pb.Draft(
            ids=[token.id for token in tokens],
            uncertain=np.packbits([token.uncertain for token in tokens], bitorder="little").tobytes(),
            features=b"".join(token.feature for token in tokens),
        )

    def _draw(self, start: int, batch: int) -> list[_Token]:
        """Draws tokens up to the end of rows that hold an uncertain one, or up to `batch` of those."""
        sync = self.generation.selection.mode == "sync"
        self.catch_up(start)
        tokens: list[_Token] = []
        uncertain = 0
        for position in range(start, self._end):
            if tokens:
                self.rows = self.cache.feed([tokens[-1].id])
            tokens.append(self._token(position, self.rows))
            uncertain += tokens[-1].uncertain
            band_ends = (position + 1) % self.band == 0 and not sync
            if uncertain and (uncertain == batch or band_ends):
                break
        return tokens

    def _token(self, position: int, rows: DraftRows) -> _Token:
        """Decides on and draws the token behind the rows."""
        uncertain = self.chooser.uncertain(position, rows)
        log_probs = self.generation.draft_row(rows.centre[-1])
        drawn = self.generation.draw(position, log_probs)
        return _Token(drawn, uncertain, float(log_probs[drawn]), b"" if uncertain else self._feature(drawn, rows))

    def _feature(self, token: int, rows: DraftRows) -> bytes:
        """What travels with a kept token, from the row it was drawn from."""
        if self.mode == "none":
            return b""
        scalars = interval_scalars(warp(rows.centre[-1:], _PLAIN), rows.radius[-1:], np.array([token]))
        if self.encode is None:
            return pack(self.mode, scalars[:, :3])
        return pack(self.mode, self.encode(rows.hidden[-1:], scalars))

    def catch_up(self, start: int) -> None:
        """As for any drafter, but in one call where rows need not equal those of a shadow drafter to the last bit."""
        rule = self.generation.rule
        if rule is not None and rule.needs_draft_probs:
            return super().catch_up(start)
        if len(self.known[:start]) > self.cache.length:
            self.rows = self.cache.feed(self.known[self.cache.length : start])

    # -- verdicts ---------------------------------------------------------------------------------------------------

    def tokens(self, message: pb.Tokens) -> None:
        """Takes the prefix as it is sampled."""
        expected, count = len(self.generation.transcript), len(message.ids)
        if message.start != expected:
            raise ProtocolError(f"the verifier sent tokens from position {message.start}, but {expected} is next")
        if expected + count > self.prefix:
            where = f"{count} tokens from position {expected}"
            raise ProtocolError(f"the verifier sent {where}, but the prefix ends at position {self.prefix}")
        self.generation.commit(message.ids, Provenance.SAMPLED)
        with self.generation.clock("draft"):
            self.catch_up(len(self.generation.transcript))

    def judged(self, draft: pb.Draft, verdict: pb.Verdict, seconds: float) -> None:
        tokens = self.drafts.pop(0)
        self._count(draft.start, tokens[: verdict.accepted], verdict)
        if len(verdict.corrected) != len(verdict.replacements):
            raise ProtocolError(
                f"a verdict corrects {len(verdict.corrected)} tokens with {len(verdict.replacements)} replacements"
            )
        replaced = dict(zip(verdict.corrected, verdict.replacements, strict=True))
        if any(place >= verdict.accepted or not tokens[place].uncertain for place in replaced):
            raise ProtocolError("a verdict corrects a token that was not uncertain")
        stood = sum(token.uncertain for token in tokens[: verdict.accepted]) - len(replaced)
        self.controller.judged(stood, len(replaced) + verdict.HasField("token"), seconds)
        for place, token in replaced.items():
            tokens[place].id = token
        self._commit(tokens[: verdict.accepted], replaced)
        if replaced:
            with self.generation.clock("draft"):
                self._repair(draft.start + min(replaced))
        if verdict.HasField("token"):
            position = len(self.generation.transcript)
            self.reject(position)
            self.generation.commit([verdict.token], Provenance.CORRECTED)
            self.chooser.truncate(position + 1)

    def _repair(self, place: int) -> None:
        """Draws again what was drafted without a correction at `place`; what comes out as it was stays in flight.

        The noise of a position is fixed, so a draft whose rows change little comes out the same. One that does not is
        void with all behind it, and a new epoch begins where it began (methods.md 5.7).
        """
        self.truncate(place)
        if not self.flying:
            return
        held = self.cache.length
        rows = self.cache.feed(self.known[held : self.next])
        self.chooser.truncate(len(self.generation.transcript))
        for index, (message, _) in enumerate(self.flying):
            before = [rows.only(message.start + i - held - 1) for i in range(len(message.ids))]
            again = [self._token(message.start + i, row) for i, row in enumerate(before)]
            if any(not new.drawn_as(old) for new, old in zip(again, self.drafts[index], strict=True)):
                return self._void(index, message.start, before[0])
        self.rows = rows

    def _void(self, index: int, start: int, rows: DraftRows) -> None:
        """Forgets the drafts in flight from number `index` on, which begins at `start`, behind these rows."""
        while len(self.flying) > index:
            self.flying.pop()
        del self.drafts[index:]
        self.generation.epoch += 1
        self.chooser.truncate(start)
        self.truncate(start)
        self.rows = rows

    def _count(self, start: int, tokens: list[_Token], verdict: pb.Verdict) -> None:
        """Takes the audit's figures: one for each audited kept token that was committed."""
        rate = round(self.generation.selection.audit, 6)
        chosen = audited(self.generation.seed, range(start, start + len(tokens)), rate)
        picked = [token for token, pick in zip(tokens, chosen, strict=True) if pick and not token.uncertain]
        if len(picked) != len(verdict.audited):
            raise ProtocolError(f"a verdict audits {len(verdict.audited)} tokens, but {len(picked)} were to be audited")
        for token, log_prob in zip(picked, verdict.audited, strict=True):
            if math.isnan(log_prob):
                raise ProtocolError("a verdict audits a token with a log-probability that is no number")
            self.audit.add(token.log_prob, log_prob)

    def _commit(self, tokens: list[_Token], replaced: dict[int, int]) -> None:
        kinds = [Provenance.VERIFIED if token.uncertain else Provenance.KEPT for token in tokens]
        for place in replaced:
            kinds[place] = Provenance.CORRECTED
        self.generation.commit([token.id for token in tokens], kinds)
        kept = (token.feature for token in tokens if not token.uncertain)
        self.generation.kept_features += b"".join(kept)

    def forget(self) -> None:
        super().forget()
        self.drafts.clear()

    def rewind(self) -> None:
        super().rewind()
        self.chooser.truncate(len(self.generation.transcript))

    # -- without the cloud ------------------------------------------------------------------------------------------

    def finish_alone(self) -> None:
        """Draws the rest on the device; what the cloud should have judged is marked as degraded."""
        self.rewind()
        generation = self.generation
        while not generation.transcript.complete:
            with generation.clock("draft"):
                self.catch_up(len(generation.transcript))
                token = self._token(len(generation.transcript), self.rows)
            generation.commit([token.id], Provenance.DEGRADED if token.uncertain else Provenance.KEPT)
