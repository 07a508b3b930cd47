"""`ar`: the target samples every token, one pass a token. The baseline of every other method."""

from __future__ import annotations

from cloud.acceptance import coupled_sample
from cloud.session import Session, Work
from shared.transcript import Provenance

__all__ = ["sample", "sample_until"]


def sample(session: Session) -> Work:
    """Samples the rest of the picture and sends it row by row, so that the device can show it as it grows."""
    yield from session.prefill()
    while not session.complete:
        start = session.position
        yield from sample_until(session, session.transcript.grid.row_end(start))
        session.send_tokens(start)


def sample_until(session: Session, stop: int) -> Work:
    """Samples the positions up to `stop` with the picture's shared noise."""
    while session.position < stop:
        rows = yield from session.target_rows([])
        token = coupled_sample(rows[0], session.gumbel(session.position, 1)[0])
        session.commit([int(token)], Provenance.SAMPLED)
