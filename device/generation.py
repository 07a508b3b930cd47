"""One picture on the device: its transcript, its noise, its clock, and the link it may lose and find again."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device.graphs import DeviceModels
from device.link import Link, LostLinkError, Stream, WireCounters
from device.report import Report
from device.retry import Retry
from device.selection import SelectionSettings
from protos import PROTOCOL
from protos import ciar_pb2 as pb
from shared import noise
from shared.errors import BusyError, LinkError, ProtocolError
from shared.methods import Method, Rule
from shared.noise import Purpose
from shared.sampling import SamplingSettings, warp
from shared.transcript import Provenance, Transcript
from shared.windows import WindowSettings

__all__ = ["Generation"]


@dataclass(slots=True)
class Generation:
    """State of a picture in progress, used by the roles.

    Args:
        models: the device's models.
        method, rule: how the work is split.
        prompt, seed, sampling: what to draw and how.
        report: filled in along the way.
        link: to the verifier; None for methods without one.
        draft_length: tokens a draft; 0 adapts it.
        in_flight: drafts that may wait for verdicts at once; above 1 the device drafts on meanwhile (pipelining). 0
            leaves it to the role.
        selection: what is kept, for methods whose device keeps tokens.
        rule_options: numbers of the rule; what is missing has its default.
        window: of window decoders.
        on_lost_link: `resume` tries again until the link's patience ends, `fail` does not, `finish-alone` draws the
            rest on the device.
        verdict_seconds: with `finish-alone`, how long an answer may take before the link counts as lost.
        on_progress: called after every commit.

    Attributes:
        scores: a number (T,) of each token to be shown as a heat map: how unsure a selective role was of it, or the
            target's entropy as a share of ln V from a window decoder; NaN elsewhere.
        feature_mode: what comes with kept tokens.
        kept_features: features of the kept tokens so far, as they went over the wire.
    """

    models: DeviceModels
    method: Method
    rule: Rule | None
    prompt: str
    seed: int
    sampling: SamplingSettings
    report: Report
    link: Link | None = None
    draft_length: int = 0
    in_flight: int = 0
    selection: SelectionSettings = field(default_factory=SelectionSettings)
    feature_mode: str = "none"
    rule_options: Mapping[str, float] = field(default_factory=dict)
    window: WindowSettings = field(default_factory=WindowSettings)
    on_lost_link: str = "resume"
    verdict_seconds: float = 2.0
    on_progress: Callable[[Transcript], None] = lambda transcript: None
    epoch: int = 0
    transcript: Transcript = field(init=False)
    scores: NDArray[np.float64] = field(init=False)
    kept_features: bytes = b""
    begun: float = field(default_factory=time.perf_counter)
    counters: WireCounters = field(default_factory=WireCounters)
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    _noise_row: tuple[int, NDArray[np.float32]] | None = None

    def __post_init__(self) -> None:
        manifest = self.models.bundle.manifest
        self.transcript = Transcript(manifest.grid, manifest.vocabulary)
        self.scores = np.full(manifest.grid.size, np.nan)

    # -- link -------------------------------------------------------------------------------------------------------

    def converse(self, talk: Callable[[Stream], None], alone: Callable[[], None]) -> None:
        """Opens a stream and lets `talk` use it until the picture is complete; after a lost link it opens again.

        The transcript is the whole state, so the picture goes on where it was. A new stream takes a new epoch, so that
        no draw is used twice.

        Args:
            talk: the role's part of a conversation.
            alone: draws the rest without the cloud, where the user allowed it.

        Raises:
            LinkError: the link was lost, and stayed so for longer than the patience of the link's settings.
            CiarError: the verifier refused.
        """
        assert self.link is not None
        waits = self.verdict_seconds if self.on_lost_link == "finish-alone" else self.link.settings.silence_seconds
        retry, lost = Retry(patience=self.link.settings.retry_seconds), False
        while not self.transcript.complete:
            held, failure = len(self.transcript), None
            try:
                with self.link.open(self.opening(), self.counters, waits) as stream:
                    talk(stream)
                if not self.transcript.complete:
                    raise ProtocolError(f"the verifier was done after {len(self.transcript)} tokens")
            except (LostLinkError, BusyError) as error:
                failure = error
            if len(self.transcript) > held:
                self.report.resumed += lost
                lost = False
                retry.progressed()
            if failure is not None and not self.transcript.complete:
                if self.on_lost_link == "fail":
                    raise failure
                if self.on_lost_link == "finish-alone":
                    return alone()
                lost = lost or isinstance(failure, LostLinkError)
                self._again(retry, failure)

    def _again(self, retry: Retry, error: LinkError | BusyError) -> None:
        self.epoch += 1
        if not retry.wait():
            if isinstance(error, BusyError):
                raise error
            done, size = len(self.transcript), self.transcript.grid.size
            assert self.link is not None
            raise LinkError(
                f"the verifier at {self.link.address} was lost with {done} of {size} tokens done and did not come back "
                f"within {retry.patience:g} s: {error}"
            ) from error

    def opening(self) -> pb.Open:
        """The message that begins or continues this picture."""
        manifest, sampling = self.models.bundle.manifest, self.sampling
        selective = None
        if self.method.device_role == "selective drafter":
            selective = pb.Selective(
                prefix=self.selection.prefix(manifest.grid),
                feature_mode=self.feature_mode,
                features=self.kept_features,
                local_repair=self.selection.repair == "local",
                audit=self.selection.audit,
            )
        window = None
        if self.method.cloud_role == "window decoder":
            window = pb.Window(size=self.window.size, after=self.window.after, init=self.window.init)
        return pb.Open(
            selective=selective,
            window=window,
            rule_options=self.rule_options,
            protocol=PROTOCOL,
            bundle_digest=manifest.digest,
            codebook_digest=manifest.codebook_digest,
            rows=manifest.grid.rows,
            cols=manifest.grid.cols,
            vocabulary=manifest.vocabulary,
            generation=self.name,
            prompt=self.prompt,
            seed=self.seed,
            method=self.method.name,
            rule=self.rule.name if self.rule else "",
            sampling=pb.Sampling(
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                guidance=sampling.guidance,
            ),
            tokens=self.transcript.tokens,
            provenance=self.transcript.provenance_bytes(),
            epoch=self.epoch,
            pipelined=self.in_flight > 1,
        )

    # -- drawing ----------------------------------------------------------------------------------------------------

    def draft_row(self, centre: NDArray[np.float32]) -> NDArray[np.float32]:
        """Warped log-probabilities (V,) of the drafter's centre logits; they imitate guided rows already."""
        row: NDArray[np.float32] = warp(centre, self.sampling.unguided())
        return row

    def draw(self, position: int, log_probs: NDArray[np.float32]) -> int:
        """Draws the token of a position from a `draft_row` (V,).

        With a coupled rule (or none) the noise is the picture's own; else it is fresh at every attempt.
        """
        if self.rule is None or not self.rule.needs_draft_probs:
            return int(np.argmax(log_probs + self._gumbel(position)))
        uniform = noise.uniform(self.seed, Purpose.DRAFT, [position], 1, round=self.epoch)[0, 0]
        cumulative = np.cumsum(np.exp(log_probs), dtype=np.float64)
        token = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
        return min(token, int(np.flatnonzero(log_probs > -np.inf)[-1]))

    def _gumbel(self, position: int) -> NDArray[np.float32]:
        grid, vocabulary = self.transcript.grid, self.transcript.vocabulary
        row = grid.row(position)
        if self._noise_row is None or self._noise_row[0] != row:
            positions = range(row * grid.cols, (row + 1) * grid.cols)
            self._noise_row = row, noise.gumbel(self.seed, Purpose.TOKEN, positions, vocabulary)
        values: NDArray[np.float32] = self._noise_row[1][grid.col(position)]
        return values

    # -- committing -------------------------------------------------------------------------------------------------

    def commit(self, tokens: Any, provenance: Provenance | Sequence[Provenance]) -> None:
        """Commits tokens behind the transcript and tells who watches."""
        if len(tokens):
            self.transcript.extend(tokens, provenance)
            if not self.report.seconds.first_row and len(self.transcript) >= self.transcript.grid.cols:
                self.report.seconds.first_row = time.perf_counter() - self.begun
            self.on_progress(self.transcript)

    @contextlib.contextmanager
    def clock(self, name: str) -> Iterator[None]:
        """Adds the time spent inside to `report.seconds.<name>`."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            seconds = self.report.seconds
            setattr(seconds, name, getattr(seconds, name) + time.perf_counter() - begun)
