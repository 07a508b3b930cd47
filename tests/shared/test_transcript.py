"""The transcript: tokens without gaps, each with where it came from, and nothing out of range ever committed."""

from __future__ import annotations

import pytest

from shared.errors import ProtocolError
from shared.grid import Grid
from shared.transcript import Provenance, Transcript, check_ids

GRID, VOCABULARY = Grid(2, 3), 5


@pytest.fixture
def transcript() -> Transcript:
    started = Transcript(GRID, VOCABULARY)
    started.extend([4, 0, 2], [Provenance.SAMPLED, Provenance.VERIFIED, Provenance.CORRECTED])
    return started


def state(transcript: Transcript) -> tuple[list[int], list[Provenance]]:
    return transcript.tokens, transcript.provenance


def test_tokens_are_committed_in_order_with_their_provenance(transcript: Transcript) -> None:
    transcript.append(3, Provenance.KEPT)
    transcript.extend([1, 1], Provenance.DEGRADED)
    assert transcript.tokens == [4, 0, 2, 3, 1, 1]
    assert transcript.provenance == [
        Provenance.SAMPLED,
        Provenance.VERIFIED,
        Provenance.CORRECTED,
        Provenance.KEPT,
        Provenance.DEGRADED,
        Provenance.DEGRADED,
    ]
    assert [transcript.count(kind) for kind in Provenance] == [1, 1, 1, 1, 2, 0]


def test_it_is_complete_exactly_when_the_grid_is_full(transcript: Transcript) -> None:
    while len(transcript) < GRID.size:
        assert not transcript.complete
        transcript.append(0, Provenance.SAMPLED)
    assert transcript.complete


@pytest.mark.parametrize("length", range(4))
def test_truncation_forgets_tokens_and_provenance_together(transcript: Transcript, length: int) -> None:
    tokens, kinds = state(transcript)
    transcript.truncate(length)
    assert state(transcript) == (tokens[:length], kinds[:length])
    transcript.append(1, Provenance.KEPT)
    assert state(transcript) == ([*tokens[:length], 1], [*kinds[:length], Provenance.KEPT])


@pytest.mark.parametrize("position", range(4))
def test_since_gives_the_tokens_behind_a_position(transcript: Transcript, position: int) -> None:
    assert transcript.since(position) == [4, 0, 2][position:]


def test_what_it_hands_out_are_copies(transcript: Transcript) -> None:
    transcript.tokens.append(1)
    transcript.provenance.clear()
    transcript.since(0).clear()
    assert transcript.tokens == [4, 0, 2]
    assert transcript.provenance == [Provenance.SAMPLED, Provenance.VERIFIED, Provenance.CORRECTED]


def test_the_wire_form_restores_the_same_transcript(transcript: Transcript) -> None:
    restored = Transcript.restore(GRID, VOCABULARY, transcript.tokens, transcript.provenance_bytes())
    assert state(restored) == state(transcript)
    assert len(transcript.provenance_bytes()) == len(transcript)
    assert all(isinstance(kind, Provenance) for kind in restored.provenance)


def test_provenance_bytes_on_the_wire_are_fixed() -> None:
    """Another number would make old devices and new verifiers misread each other."""
    assert {kind.name: int(kind) for kind in Provenance} == {
        "SAMPLED": 0,
        "KEPT": 1,
        "VERIFIED": 2,
        "CORRECTED": 3,
        "DEGRADED": 4,
        "RELAXED": 5,
    }


@pytest.mark.parametrize("token", [-1, VOCABULARY, 2**31])
def test_an_id_outside_the_vocabulary_is_named_with_its_position_and_commits_nothing(
    transcript: Transcript, token: int
) -> None:
    before = state(transcript)
    with pytest.raises(ProtocolError, match=rf"token id {token} at position 4 is outside the vocabulary 0\.\.4"):
        transcript.extend([1, token, 2], Provenance.KEPT)
    assert state(transcript) == before


def test_more_tokens_than_the_grid_holds_are_refused_and_nothing_is_committed(transcript: Transcript) -> None:
    before = state(transcript)
    with pytest.raises(ProtocolError, match=r"3 \+ 4 tokens exceed the 2x3 grid"):
        transcript.extend([0, 0, 0, 0], Provenance.KEPT)
    assert state(transcript) == before


@pytest.mark.parametrize(
    ("tokens", "provenance", "message"),
    [
        ([1, 2], b"\x00", "2 tokens but 1 provenance bytes"),
        ([1], b"\x00\x01", "1 tokens but 2 provenance bytes"),
        ([1, 2], b"\x00\x06", "provenance 6 at position 1 is unknown"),
        ([1, 5], b"\x00\x00", "token id 5 at position 1"),
        ([0] * 7, b"\x00" * 7, "exceed the 2x3 grid"),
    ],
)
def test_a_damaged_wire_form_is_refused_with_what_and_where(tokens: list[int], provenance: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        Transcript.restore(GRID, VOCABULARY, tokens, provenance)


def test_check_ids_names_the_position_in_the_picture() -> None:
    check_ids([0, 4], 10, VOCABULARY)
    with pytest.raises(ProtocolError, match="token id 5 at position 11"):
        check_ids([0, 5], 10, VOCABULARY)
