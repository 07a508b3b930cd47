"""The drafter of `sd`: proposes tokens, sends them for judgement, and follows the verdicts.

With one draft in flight the device waits for each verdict and gets a bonus token for a fully accepted draft. With more
it drafts on while verdicts fly; a correction then discards what was drafted behind it, on both sides, by the epoch.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from device.generation import Generation
from device.link import Stream
from device.pacing import AdaptivePace, FixedPace, Pace
from protos import ciar_pb2 as pb
from shared.errors import ProtocolError
from shared.graphs import DrafterCache, DraftRows
from shared.transcript import Provenance

__all__ = ["draft"]


def draft(generation: Generation) -> None:
    """Drafts until the picture is complete."""
    with generation.clock("draft"):
        features = generation.models.captions.encode(generation.prompt)
        cache = generation.models.drafter()
        rows = cache.prefill(features)
    pace: Pace = FixedPace(generation.draft_length) if generation.draft_length else AdaptivePace()
    drafter = _Drafter(generation, features, cache, rows, pace)
    generation.converse(drafter.follow)


@dataclass(slots=True)
class _Drafter:
    """The drafting loop of one picture.

    Args:
        features: the prompt's feature rows.
        rows: the drafter's rows; the last predicts the position behind the tokens that the cache holds.
    """

    generation: Generation
    features: NDArray[np.float32]
    cache: DrafterCache
    rows: DraftRows
    pace: Pace
    flying: deque[tuple[pb.Draft, float]] = field(default_factory=deque)

    def follow(self, stream: Stream) -> None:
        """Drafts over one stream until the verifier says that the picture is complete."""
        generation = self.generation
        self._rewind()
        while True:
            if self._may_draft():
                self._send(stream)
                message = stream.poll()
            else:
                with generation.clock("wait"):
                    message = stream.receive()
            while message is not None:
                if message.HasField("done"):
                    return
                self._take(message)
                message = stream.poll() if self.flying else None

    def _rewind(self) -> None:
        """Forgets what was in flight on an earlier stream; the last committed token is fed again for its row."""
        self._forget()
        held = len(self.generation.transcript)
        if held:
            self.cache.truncate(min(self.cache.length, held - 1))
        elif self.cache.length:
            self.rows = self.cache.prefill(self.features)

    def _forget(self) -> None:
        self.flying.clear()
        self.pace.forget()

    def _may_draft(self) -> bool:
        return len(self.flying) < self.generation.in_flight and self._next < self.generation.transcript.grid.size

    @property
    def _next(self) -> int:
        """The position behind everything that is committed or in flight."""
        if self.flying:
            last = self.flying[-1][0]
            return last.start + len(last.ids)
        return len(self.generation.transcript)

    def _send(self, stream: Stream) -> None:
        generation, start = self.generation, self._next
        begun = time.perf_counter()
        with generation.clock("draft"):
            ids = self._propose(start)
        sent = time.perf_counter()
        self.pace.drafted(sent - begun)
        message = pb.Draft(epoch=generation.epoch, start=start, ids=ids)
        stream.send(pb.DeviceMessage(draft=message))
        generation.report.draft.proposed += len(ids)
        generation.report.wire.round_trips += 1
        self.flying.append((message, sent))

    def _propose(self, start: int) -> list[int]:
        """Draws tokens from position `start` on, as many as the pace wants, feeding the drafter one at a time."""
        self._catch_up(start)
        self.pace.begin()
        ids: list[int] = []
        for position in range(start, self.generation.transcript.grid.size):
            if ids:
                self.rows = self.cache.feed([ids[-1]])
            log_probs = self.generation.draft_row(self.rows.centre[-1])
            if not self.pace.wants(float(np.exp(log_probs.max()))):
                break
            ids.append(self.generation.draw(position, log_probs))
        return ids

    def _catch_up(self, start: int) -> None:
        """Feeds what is committed or in flight and the drafter has not seen: a correction, a bonus, the last token."""
        known = self.generation.transcript.tokens + [token for message, _ in self.flying for token in message.ids]
        for token in known[self.cache.length : start]:
            self.rows = self.cache.feed([token])

    def _take(self, message: pb.CloudMessage) -> None:
        kind = str(message.WhichOneof("body"))
        self.generation.report.cloud.add(getattr(message, kind).cost)
        if kind == "verdict":
            self._settle(message.verdict)
        elif kind != "opened":
            raise ProtocolError(f"the verifier sent {kind} to a drafter")

    def _settle(self, verdict: pb.Verdict) -> None:
        """Commits what a verdict says; verdicts of an old epoch, or that came twice, change nothing."""
        generation, start = self.generation, len(self.generation.transcript)
        if verdict.epoch != generation.epoch or verdict.start < start:
            return
        if not self.flying or verdict.start != self.flying[0][0].start or verdict.start != start:
            raise ProtocolError(f"a verdict came for position {verdict.start}, but {start} is next")
        message, sent = self.flying.popleft()
        if verdict.accepted > len(message.ids):
            raise ProtocolError(f"a verdict accepts {verdict.accepted} of {len(message.ids)} drafted tokens")
        self.pace.judged(verdict.accepted, time.perf_counter() - sent)
        generation.commit(message.ids[: verdict.accepted], Provenance.VERIFIED)
        rejected = verdict.accepted < len(message.ids)
        if rejected:
            self._forget()
            generation.epoch += 1
            # The cache may hold less than what was committed: the last drafted token is fed only when it is needed.
            self.cache.truncate(min(self.cache.length, len(generation.transcript)))
        if verdict.HasField("token"):
            generation.commit([verdict.token], Provenance.CORRECTED if rejected else Provenance.SAMPLED)
        elif rejected:
            raise ProtocolError("a verdict rejects a token without a correction")
