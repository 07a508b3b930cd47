"""What a generation reports: where its time, bytes and tokens went."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from device.link import WireCounters
from protos import ciar_pb2 as pb
from shared.audit import Audit
from shared.transcript import Provenance, Transcript

__all__ = ["CloudUse", "DraftUse", "Report", "Seconds", "SelectionUse"]


@dataclass(slots=True)
class Seconds:
    """Wall time: in all, in the drafter, waiting for the cloud, in the codec, and until the first row of tokens."""

    total: float = 0.0
    draft: float = 0.0
    wait: float = 0.0
    codec: float = 0.0
    first_row: float = 0.0


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
class SelectionUse:
    """What a selective device kept and what it cost; see `SelectionSettings` for the settings.

    Args:
        mode, repair, score, threshold_mode, cloud_budget, prefix, features, draft_rows: the settings in use.
        batch: uncertain tokens a message, as the controller last chose.
        audited: kept tokens that were judged after the fact.
        kept_tv: estimated mean total variation of kept rows to the target's, None when nothing was audited.
        kept_tv_error: its standard error, None below two audited tokens.
    """

    mode: str = ""
    repair: str = ""
    score: str = ""
    threshold_mode: str = ""
    cloud_budget: float = 0.0
    prefix: int = 0
    features: str = ""
    batch: int = 0
    draft_rows: int = 1
    audited: int = 0
    kept_tv: float | None = None
    kept_tv_error: float | None = None

    def count_audit(self, audit: Audit) -> None:
        self.audited, self.kept_tv, self.kept_tv_error = audit.tokens, audit.tv, audit.error

    def to_text(self) -> list[str]:
        rows = f" or {self.draft_rows} rows" if self.draft_rows > 1 else ""
        lines = [
            f"kept    by {self.score} score, {self.threshold_mode} threshold, {self.mode}, {self.repair} repair, "
            f"{self.batch} uncertain{rows} a message, features {self.features}"
        ]
        if self.kept_tv is not None:
            error = f" +- {self.kept_tv_error:.3f}" if self.kept_tv_error is not None else ""
            lines.append(
                f"audit   {self.audited} kept tokens: total variation to the target about {self.kept_tv:.3f}{error}"
            )
        return lines


@dataclass(slots=True)
class Report:
    """The report of one picture; `to_json` is what `device-client --json` prints.

    Args:
        law: `lossless` when the tokens follow exactly the warped target's law.
        tokens: tokens of the picture.
        cloud_call_rate: share of the picture's tokens that the cloud sampled or judged.
        resumed: times the picture went on after a lost link.
        degraded: tokens that the device drew because the link was lost.
        relaxed: tokens that a relaxed rule accepted where the lossless one would have rejected.
        tv_cost: total variation to the target that relaxing may have cost, summed over tokens; None if unknown.
        selection: what a selective device kept; None for other methods.
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
    degraded: int = 0
    relaxed: int = 0
    tv_cost: float | None = 0.0
    selection: SelectionUse | None = None

    def count_tokens(self, transcript: Transcript) -> None:
        """Fills in what the transcript tells."""
        kinds = {kind: transcript.count(kind) for kind in Provenance}
        alone = kinds[Provenance.KEPT] + kinds[Provenance.DEGRADED]
        self.tokens = len(transcript)
        self.degraded = kinds[Provenance.DEGRADED]
        if self.degraded:
            self.law = "lossy"
        self.relaxed = kinds[Provenance.RELAXED]
        # A window decoder's drafts are not the device's.
        self.draft.accepted = kinds[Provenance.VERIFIED] + (self.relaxed if self.draft.proposed else 0)
        self.draft.corrected = kinds[Provenance.CORRECTED]
        self.draft.uncertain = self.draft.accepted + self.draft.corrected
        self.draft.kept_on_device = alone
        self.cloud_call_rate = (self.tokens - alone) / self.tokens if self.tokens else 0.0

    def add_cost(self, message: pb.Tokens | pb.Verdict, known: bool) -> None:
        """Adds what relaxing may have cost the tokens of a message; without a figure it is unknown from then on."""
        if self.tv_cost is not None:
            self.tv_cost = self.tv_cost + message.tv_cost if known else None

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
        if self.relaxed or (self.rule and self.law == "lossy" and not self.selection):
            cost = f"{self.tv_cost / max(1, self.tokens):.4f} a token" if self.tv_cost is not None else "unknown"
            lines.append(
                f"relaxed {self.relaxed} of {self.tokens} tokens; total variation to the target at most {cost}"
            )
        if self.selection:
            lines += self.selection.to_text()
        if self.resumed:
            lines.append(f"link    lost and resumed {self.resumed} times")
        if self.degraded:
            lines.append(f"link    lost; the device drew {self.degraded} tokens that the cloud should have judged")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
