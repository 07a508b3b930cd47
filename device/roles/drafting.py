"""The loop of every role that drafts: proposes tokens, sends them for judgement, and follows the verdicts.

With one draft in flight the device waits for each verdict. With more it drafts on while verdicts fly; a correction then
discards what was drafted behind it, on both sides, by the epoch.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque

import numpy as np
from numpy.typing import NDArray

from device.generation import Generation
from device.link import Stream
from protos import ciar_pb2 as pb
from shared.errors import ProtocolError
from shared.graphs import DrafterCache, DraftRows

__all__ = ["DraftingLoop"]


class DraftingLoop(ABC):
    """Drafts of one picture. A role says what a draft is and what a verdict means for it.

    Args:
        generation: the picture.
        features: the prompt's feature rows.
        cache: a drafter that was fed nothing yet.
        in_flight: drafts that may wait for verdicts at once.

    Attributes:
        rows: the drafter's rows; the last predicts the position behind the tokens that the cache holds.
        flying: drafts without a verdict, and when each was sent.
    """

    rows: DraftRows

    def __init__(
        self, generation: Generation, features: NDArray[np.float32], cache: DrafterCache, in_flight: int
    ) -> None:
        self.generation, self.features, self.cache, self.in_flight = generation, features, cache, in_flight
        self.flying: deque[tuple[pb.Draft, float]] = deque()
        self._heard = 0.0
        with generation.clock("draft"):
            self.rows = cache.prefill(features)

    def follow(self, stream: Stream) -> None:
        """Drafts over one stream until the verifier says that the picture is complete."""
        self.rewind()
        while True:
            if self.may_draft() and self._send(stream):
                message = stream.poll()
            else:
                with self.generation.clock("wait"):
                    message = stream.receive()
            while message is not None:
                if message.HasField("done"):
                    return
                self._take(message)
                message = stream.poll() if self.flying else None

    # -- what a role decides ----------------------------------------------------------------------------------------

    @abstractmethod
    def propose(self, start: int) -> pb.Draft | None:
        """Drafts tokens from position `start` on; epoch and start are filled in by the caller.

        None to wait for the verdicts in flight first; there must be some then.
        """

    @abstractmethod
    def judged(self, draft: pb.Draft, verdict: pb.Verdict, seconds: float) -> None:
        """Commits what a verdict says of the oldest draft.

        Args:
            seconds: since the draft was sent, or since the verdict before, whichever was later.
        """

    def forget(self) -> None:
        """No verdict will come for what is in flight."""
        self.flying.clear()

    def tokens(self, message: pb.Tokens) -> None:
        """Takes tokens that the cloud sampled on its own."""
        raise ProtocolError("the verifier sent tokens to a drafter that asked for none")

    # -- the loop ---------------------------------------------------------------------------------------------------

    def rewind(self) -> None:
        """Forgets what was in flight on an earlier stream; the last committed token is fed again for its row."""
        self.forget()
        held = len(self.generation.transcript)
        if held:
            self.cache.truncate(min(self.cache.length, held - 1))
        elif self.cache.length:
            self.rows = self.cache.prefill(self.features)

    def may_draft(self) -> bool:
        return len(self.flying) < self.in_flight and self.next < self.generation.transcript.grid.size

    @property
    def next(self) -> int:
        """The position behind everything that is committed or in flight."""
        if self.flying:
            last = self.flying[-1][0]
            return last.start + len(last.ids)
        return len(self.generation.transcript)

    @property
    def known(self) -> list[int]:
        """The tokens that are committed or in flight."""
        return self.generation.transcript.tokens + [token for message, _ in self.flying for token in message.ids]

    def catch_up(self, start: int) -> None:
        """Feeds what is committed or in flight and the drafter has not seen: corrections, bonuses, the last token."""
        for token in self.known[self.cache.length : start]:
            self.rows = self.cache.feed([token])

    def truncate(self, position: int) -> None:
        """Rolls the drafter back to `position`; it may hold less, since the last drafted token is fed when needed."""
        self.cache.truncate(min(self.cache.length, position))

    def reject(self, position: int) -> None:
        """A draft failed at `position`: what was drafted from there on is void, and a new epoch begins."""
        self.forget()
        self.generation.epoch += 1
        self.truncate(position)

    def _send(self, stream: Stream) -> bool:
        """Drafts and sends; False when the role would rather wait."""
        generation, start = self.generation, self.next
        with generation.clock("draft"):
            message = self.propose(start)
        if message is None:
            return False
        message.epoch, message.start = generation.epoch, start
        stream.send(pb.DeviceMessage(draft=message))
        generation.report.wire.round_trips += 1
        self.flying.append((message, time.perf_counter()))
        return True

    def _take(self, message: pb.CloudMessage) -> None:
        kind = str(message.WhichOneof("body"))
        self.generation.report.cloud.add(getattr(message, kind).cost)
        if kind == "verdict":
            self._settle(message.verdict)
        elif kind == "tokens":
            self.tokens(message.tokens)

    def _settle(self, verdict: pb.Verdict) -> None:
        """Checks a verdict; those of an old epoch, or that came twice, change nothing."""
        start = len(self.generation.transcript)
        # A draft that a repair left as it was keeps the epoch it was sent in.
        epoch = self.flying[0][0].epoch if self.flying else self.generation.epoch
        if verdict.epoch != epoch or verdict.start < start:
            return
        if not self.flying or verdict.start != self.flying[0][0].start or verdict.start != start:
            raise ProtocolError(f"a verdict came for position {verdict.start}, but {start} is next")
        message, sent = self.flying.popleft()
        if verdict.accepted > len(message.ids):
            raise ProtocolError(f"a verdict accepts {verdict.accepted} of {len(message.ids)} drafted tokens")
        if verdict.accepted < len(message.ids) and not verdict.HasField("token"):
            raise ProtocolError("a verdict rejects a token without a correction")
        now = time.perf_counter()
        seconds, self._heard = now - max(sent, self._heard), now
        self.judged(message, verdict, seconds)
