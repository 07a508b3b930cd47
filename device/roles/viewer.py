"""The viewer: the cloud draws, the device receives tokens as they are committed and shows them."""

from __future__ import annotations

import numpy as np

from device.generation import Generation
from device.link import Stream
from device.roles.solo import finish_alone
from protos import ciar_pb2 as pb
from shared.errors import ProtocolError
from shared.transcript import Provenance

__all__ = ["view"]


def view(generation: Generation) -> None:
    """Receives the rest of the picture."""
    generation.converse(lambda stream: _follow(generation, stream), lambda: finish_alone(generation))


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
    count = len(tokens.ids)
    if len(tokens.provenance) not in (0, count) or len(tokens.entropy) not in (0, count):
        raise ProtocolError(f"the verifier sent {count} tokens, but not as many marks of them")
    if tokens.entropy:
        generation.scores[expected : expected + count] = np.frombuffer(tokens.entropy, np.uint8) / 255.0
        generation.report.add_cost(tokens, tokens.HasField("tv_cost"))
    kinds = _kinds(tokens.provenance) if tokens.provenance else [Provenance.SAMPLED] * count
    generation.commit(tokens.ids, kinds)


def _kinds(marks: bytes) -> list[Provenance]:
    if not set(marks) <= {Provenance.SAMPLED, Provenance.RELAXED}:
        raise ProtocolError(f"the verifier marked tokens by {sorted(set(marks))}, of which a viewer knows 0 and 5")
    return [Provenance(mark) for mark in marks]
