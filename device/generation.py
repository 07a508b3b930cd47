"""One picture on the device: its transcript, its noise, its clock, and the link it may lose and find again."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device.graphs import DeviceModels
from device.link import Link, LostLinkError, Stream, WireCounters
from device.report import Report
from device.retry import Retry
from protos import PROTOCOL
from protos import ciar_pb2 as pb
from shared import noise
from shared.errors import BusyError, LinkError, ProtocolError
from shared.methods import Method, Rule
from shared.noise import Purpose
from shared.sampling import SamplingSettings, warp
from shared.transcript import Provenance, Transcript

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
        in_flight: drafts that may wait for verdicts at once; above 1 the device drafts on meanwhile (pipelining).
        on_progress: called after every commit.
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
    in_flight: int = 1
    on_progress: Callable[[Transcript], None] = lambda transcript: None
    epoch: int = 0
    transcript: Transcript = field(init=False)
    counters: WireCounters = field(default_factory=WireCounters)
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    _noise_row: tuple[int, NDArray[np.float32]] | None = None

    def __post_init__(self) -> None:
        manifest = self.models.bundle.manifest
        self.transcript = Transcript(manifest.grid, manifest.vocabulary)

    # -- link -------------------------------------------------------------------------------------------------------

    def converse(self, talk: Callable[[Stream], None]) -> None:
        """Opens a stream and lets `talk` use it until the picture is complete; after a lost link it opens again.

        The transcript is the whole state, so the picture goes on where it was. A new stream takes a new epoch, so that
        no draw is used twice.

        Raises:
            LinkError: the link stayed lost for longer than the patience of the link's settings.
            CiarError: the verifier refused.
        """
        assert self.link is not None
        retry, lost = Retry(patience=self.link.settings.retry_seconds), False
        while not self.transcript.complete:
            held, failure = len(self.transcript), None
            try:
                with self.link.open(self.opening(), self.counters) as stream:
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
        return pb.Open(
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

    def commit(self, tokens: Any, provenance: Provenance) -> None:
        """Commits tokens behind the transcript and tells who watches."""
        if len(tokens):
            self.transcript.extend(tokens, provenance)
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
