"""Checks what a device asks for, before anything is computed for it."""

from __future__ import annotations

from cloud.session import Request
from protos import PROTOCOL
from protos import ciar_pb2 as pb
from shared.bundle import Manifest
from shared.errors import BundleError, ProtocolError
from shared.graphs import CaptionEncoder
from shared.methods import find_method, find_rule
from shared.sampling import SamplingSettings
from shared.transcript import Transcript

__all__ = ["admit"]

# Half of what noise keys hold, so that a picture can count on from any epoch it begins with.
_EPOCHS = 2**23


def admit(opening: pb.Open, manifest: Manifest, captions: CaptionEncoder) -> Request:
    """Checks an opening message and encodes its prompt.

    Raises:
        BundleError: the device's protocol or bundle is another; the message names both values.
        SettingsError: prompt, method, rule or sampling are not acceptable.
        ProtocolError: the transcript or a number is out of range.
    """
    _check_handshake(opening, manifest)
    method = find_method(opening.method)
    if method.cloud_role == "-":
        raise ProtocolError(f"method {method.name} runs on the device alone; the verifier has no part in it")
    sampling = SamplingSettings(
        # float32 on the wire: 0.7 must not come back as 0.699999988.
        temperature=round(opening.sampling.temperature, 6),
        top_k=opening.sampling.top_k,
        top_p=round(opening.sampling.top_p, 6),
        guidance=round(opening.sampling.guidance, 6),
    )
    if opening.epoch >= _EPOCHS:
        raise ProtocolError(f"epoch: 0..{_EPOCHS - 1} is allowed, not {opening.epoch}")
    return Request(
        # It goes into the log, where it must not pass for lines of its own.
        generation=opening.generation[:64].encode("unicode_escape").decode(),
        features=captions.encode(opening.prompt),
        transcript=Transcript.restore(manifest.grid, manifest.vocabulary, opening.tokens, opening.provenance),
        method=method,
        rule=find_rule(method, opening.rule),
        sampling=sampling,
        seed=opening.seed,
        epoch=opening.epoch,
        bonus=not opening.pipelined,
    )


def _check_handshake(opening: pb.Open, manifest: Manifest) -> None:
    pairs = {
        "protocol version": (opening.protocol, PROTOCOL),
        "grid": (f"{opening.rows}x{opening.cols}", str(manifest.grid)),
        "vocabulary": (opening.vocabulary, manifest.vocabulary),
        "codebook digest": (opening.codebook_digest, manifest.codebook_digest),
        "bundle digest": (opening.bundle_digest, manifest.digest),
    }
    for name, (device, verifier) in pairs.items():
        if device != verifier:
            raise BundleError(
                f"{name}: the device has {device!s:.64}, the verifier {verifier!s:.64}; "
                "both must run the same bundle (leave --bundle out to fetch the verifier's)"
            )
