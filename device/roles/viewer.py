"""The viewer: the cloud draws, the device receives tokens as they are committed and shows them."""

from __future__ import annotations

from device.generation import Generation
from device.link import Stream
from protos import ciar_pb2 as pb
from shared.errors import ProtocolError
from shared.transcript import Provenance

__all__ = ["view"]


def view(generation: Generation) -> None:
    """Receives the rest of the picture."""
    generation.converse(lambda stream: _follow(generation, stream))


def _follow(generation: Generation, stream: Stream) -> None:
    generation.report.wire.round_trips += 1
    while True:
        with generation.clock("wait"):
            message = stream.receive()
        kind = message.WhichOneof("body")
        if kind == "done":
            return
        generation.report.cloud.add(getattr(message, str(kind)).cost)
        if kind == "tokens":
            _take(generation, message.tokens)
        elif kind != "opened":
            raise ProtocolError(f"the verifier sent a {kind} to a viewer")


def _take(generation: Generation, tokens: pb.Tokens) -> None:
    expected = len(generation.transcript)
    if tokens.start != expected:
        raise ProtocolError(f"the verifier sent tokens from position {tokens.start}, but {expected} is next")
    generation.commit(tokens.ids, Provenance.SAMPLED)
