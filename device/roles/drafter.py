"""The drafter of `sd`: every drafted token is judged; one that stands whole earns a bonus unless it is pipelined."""

from __future__ import annotations

import time

import numpy as np

from device.generation import Generation
from device.pacing import AdaptivePace, FixedPace, Pace
from device.roles.drafting import DraftingLoop
from device.roles.solo import finish_alone
from protos import ciar_pb2 as pb
from shared.transcript import Provenance

__all__ = ["draft"]


def draft(generation: Generation) -> None:
    """Drafts until the picture is complete."""
    pace: Pace = FixedPace(generation.draft_length) if generation.draft_length else AdaptivePace()
    generation.converse(_Drafter(generation, pace).follow, lambda: finish_alone(generation))


class _Drafter(DraftingLoop):
    """Drafts whose length the pace decides."""

    def __init__(self, generation: Generation, pace: Pace) -> None:
        self.pace = pace
        self.lossless = generation.rule is None or generation.rule.lossless
        with generation.clock("draft"):
            features = generation.models.captions.encode(generation.prompt)
        super().__init__(generation, features, generation.models.drafter(), generation.in_flight or 1)

    def propose(self, start: int) -> pb.Draft | None:
        """Draws tokens from position `start` on, as many as the pace wants, feeding the drafter one at a time."""
        begun = time.perf_counter()
        self.catch_up(start)
        self.pace.begin()
        ids: list[int] = []
        for position in range(start, self.generation.transcript.grid.size):
            if ids:
                self.rows = self.cache.feed([ids[-1]])
            log_probs = self.generation.draft_row(self.rows.centre[-1])
            if not self.pace.wants(float(np.exp(log_probs.max()))):
                break
            ids.append(self.generation.draw(position, log_probs))
        if not ids:
            return None
        self.pace.drafted(time.perf_counter() - begun)
        self.generation.report.draft.proposed += len(ids)
        return pb.Draft(ids=ids)

    def judged(self, draft: pb.Draft, verdict: pb.Verdict, seconds: float) -> None:
        generation, accepted = self.generation, verdict.accepted
        self.pace.judged(accepted, seconds)
        kinds = [Provenance.RELAXED if i in verdict.relaxed else Provenance.VERIFIED for i in range(accepted)]
        generation.commit(draft.ids[:accepted], kinds)
        generation.report.add_cost(verdict, known=verdict.HasField("tv_cost") or self.lossless)
        rejected = accepted < len(draft.ids)
        if rejected:
            self.reject(len(generation.transcript))
        if verdict.HasField("token"):
            generation.commit([verdict.token], Provenance.CORRECTED if rejected else Provenance.SAMPLED)

    def forget(self) -> None:
        super().forget()
        self.pace.forget()
