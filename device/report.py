"""What a generation reports: where its time, bytes and tokens went."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from device.link import WireCounters
from protos import ciar_pb2 as pb
from shared.transcript import Provenance, Transcript

__all__ = ["CloudUse", "DraftUse", "Report", "Seconds"]


@dataclass(slots=True)
class Seconds:
    """Wall time: in all, in the drafter, waiting for the cloud, and in the image codec."""

    total: float = 0.0
    draft: float = 0.0
    wait: float = 0.0
    codec: float = 0.0


@dataclass(slots=True)
class CloudUse:
    """Passes of the target this picture took part in (both guidance rows are one pass, the prompt's prefill is
    included), the picture's rows in them, and the seconds of those passes."""

    forwards: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, cost: pb.Cost) -> None:
        self.forwards += cost.forwards
        self.tokens += cost.tokens
        self.seconds += cost.microseconds / 1e6


@dataclass(slots=True)
class DraftUse:
    """Drafted tokens.

    Args:
        proposed: tokens sent for judgement, drafts that were overtaken by a correction included.
        accepted: committed tokens that the cloud judged and left standing.
        kept_on_device: committed tokens that the cloud never judged.
        uncertain: committed tokens that the device drafted and the cloud judged.
        corrected: committed tokens with which the cloud replaced a draft.
    """

    proposed: int = 0
    accepted: int = 0
    kept_on_device: int = 0
    uncertain: int = 0
    corrected: int = 0


@dataclass(slots=True)
class Wire:
    """Serialised messages, and waits of the device for an answer."""

    bytes_up: int = 0
    bytes_down: int = 0
    messages_up: int = 0
    messages_down: int = 0
    round_trips: int = 0


@dataclass(slots=True)
class Report:
    """The report of one picture; `to_json` is what `device-client --json` prints.

    Args:
        law: `lossless` when the tokens follow exactly the warped target's law.
        tokens: tokens of the picture.
        cloud_call_rate: share of the picture's tokens that the cloud sampled or judged.
        resumed: times the picture went on after a lost link.
    """

    method: str
    rule: str | None
    law: str
    seed: int
    prompt: str
    output: str | None = None
    tokens: int = 0
    seconds: Seconds = field(default_factory=Seconds)
    cloud: CloudUse = field(default_factory=CloudUse)
    draft: DraftUse = field(default_factory=DraftUse)
    wire: Wire = field(default_factory=Wire)
    cloud_call_rate: float = 0.0
    resumed: int = 0

    def count_tokens(self, transcript: Transcript) -> None:
        """Fills in what the transcript tells."""
        kinds = {kind: transcript.count(kind) for kind in Provenance}
        alone = kinds[Provenance.KEPT] + kinds[Provenance.DEGRADED]
        self.tokens = len(transcript)
        self.draft.accepted = kinds[Provenance.VERIFIED]
        self.draft.corrected = kinds[Provenance.CORRECTED]
        self.draft.uncertain = self.draft.accepted + self.draft.corrected
        self.draft.kept_on_device = alone
        self.cloud_call_rate = (self.tokens - alone) / self.tokens if self.tokens else 0.0

    def count_wire(self, counters: WireCounters) -> None:
        """Fills in the bytes and messages of all streams."""
        for name, value in asdict(counters).items():
            setattr(self.wire, name, value)

    def to_json(self) -> str:
        """One JSON object on one line."""
        return json.dumps(asdict(self), ensure_ascii=False)

    def to_text(self) -> str:
        """The report for people, a few lines."""
        time, cloud, draft, wire = self.seconds, self.cloud, self.draft, self.wire
        rule = f" with rule {self.rule}" if self.rule else ""
        lines = [
            f"{self.method}{rule} ({self.law}), seed {self.seed}",
            f"time    {time.total:.2f} s: drafting {time.draft:.2f}, waiting {time.wait:.2f}, pixels {time.codec:.2f}",
        ]
        if cloud.forwards:
            lines.append(f"cloud   {cloud.forwards} passes, {cloud.tokens} rows, {cloud.seconds:.2f} s")
            lines.append(
                f"wire    {wire.bytes_up} B up, {wire.bytes_down} B down, {wire.messages_up} + {wire.messages_down} "
                f"messages, {wire.round_trips} round trips"
            )
        if draft.proposed:
            lines.append(
                f"drafts  {draft.proposed} proposed; of {self.tokens} tokens {draft.accepted} accepted, "
                f"{draft.corrected} corrected, {draft.kept_on_device} kept on the device"
            )
        lines.append(f"calls   the cloud sampled or judged {self.cloud_call_rate:.0%} of the tokens")
        if self.resumed:
            lines.append(f"link    lost and resumed {self.resumed} times")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
