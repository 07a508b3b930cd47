"""`ar`: the target samples every token, one pass a token. The baseline of every other method.

Also how other methods let the target begin a picture: the same tokens, in fewer passes.
"""

from __future__ import annotations

from cloud.acceptance import coupled_sample
from cloud.session import Session, Work
from shared.transcript import Provenance

__all__ = ["sample", "sample_ahead", "sample_until"]


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


def sample_ahead(session: Session, stop: int) -> Work:
    """Samples the positions up to `stop` as `sample_until` does, in fewer passes, and sends what each of them settles.

    A pass reads guesses for all positions: copies of the last token at first, then what the rows of the last pass draw
    with the picture's noise. A guess that its own row draws too is settled (Jacobi iteration; methods.md 7.1), so a
    plain background takes a pass or two.
    """
    start = session.position
    if start < stop:
        yield from sample_until(session, start + 1)  # no pass: the row behind what prefill read is known
        session.send_tokens(start)
    guesses: list[int] = []
    while session.position < stop:
        start, ahead = session.position, stop - session.position - 1
        guesses += [(session.transcript.tokens + guesses)[-1]] * (ahead - len(guesses))
        rows = yield from session.target_rows(guesses)
        own = coupled_sample(rows, session.gumbel(start, len(rows))).tolist()
        wrong = next((i for i, token in enumerate(guesses) if token != own[i]), ahead)
        session.commit(own[:wrong], Provenance.SAMPLED)
        session.commit([own[wrong]], Provenance.SAMPLED)  # on its own: what was read at its place was a guess
        guesses = own[wrong + 1 : ahead]  # not the token of the last place: the row behind it is not wanted
        session.send_tokens(start)
