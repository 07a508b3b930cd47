"""Checks what a device asks for, before anything is computed for it."""

from __future__ import annotations

from collections.abc import Sequence

from cloud.session import Request, Selective
from protos import PROTOCOL
from protos import ciar_pb2 as pb
from shared.bundle import Manifest
from shared.errors import BundleError, ProtocolError, SettingsError
from shared.features import unpack
from shared.graphs import CaptionEncoder
from shared.methods import Rule, find_method, find_rule
from shared.sampling import SamplingSettings
from shared.transcript import Provenance, Transcript
from shared.windows import WindowSettings

__all__ = ["admit"]

# Half of what noise keys hold, so that a picture can count on from any epoch it begins with.
_EPOCHS = 2**23


def admit(
    opening: pb.Open, manifest: Manifest, captions: CaptionEncoder, dim: int = 0, feature_modes: Sequence[str] = ()
) -> Request:
    """Checks an opening message and encodes its prompt.

    Args:
        dim: width of the target, for interval features.
        feature_modes: modes of interval features that the bundle knows.

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
    transcript = Transcript.restore(manifest.grid, manifest.vocabulary, opening.tokens, opening.provenance)
    rule = find_rule(method, opening.rule)
    options = {name: round(value, 6) for name, value in opening.rule_options.items()}
    if options and rule is None:
        raise SettingsError(f"rule option {min(options)}: method {method.name} judges nothing")
    selective, window = None, None
    if method.cloud_role == "window decoder":
        wish = opening.window
        window = WindowSettings(wish.size, wish.after, wish.init) if opening.HasField("window") else WindowSettings()
    if method.cloud_role == "interval verifier":
        selective = _selective(opening, rule, transcript, dim, feature_modes)
    return Request(
        # It goes into the log, where it must not pass for lines of its own.
        generation=opening.generation[:64].encode("unicode_escape").decode(),
        features=captions.encode(opening.prompt),
        transcript=transcript,
        method=method,
        rule=rule,
        sampling=sampling,
        seed=opening.seed,
        epoch=opening.epoch,
        bonus=not opening.pipelined,
        selective=selective,
        rule_options=rule.settings(options) if rule else {},
        window=window,
    )


def _selective(
    opening: pb.Open, rule: Rule | None, transcript: Transcript, dim: int, feature_modes: Sequence[str]
) -> Selective:
    """What the device keeps and how the rest is judged.

    Raises:
        ProtocolError: the message is missing, or a number in it is out of range.
        SettingsError: the bundle was not trained for the feature mode, or rule and repair do not go together.
    """
    if not opening.HasField("selective"):
        raise ProtocolError(f"method {opening.method}: the Open message says nothing of what the device keeps")
    wish = opening.selective
    if wish.feature_mode not in ("none", *feature_modes):
        known = ", ".join(("none", *feature_modes))
        raise SettingsError(f"features: the verifier's bundle knows {known}, not {wish.feature_mode!r}")
    if wish.prefix > transcript.grid.size:
        raise ProtocolError(f"prefix: at most {transcript.grid.size} tokens are in the picture, not {wish.prefix}")
    if not 0.0 <= wish.audit <= 1.0:
        raise ProtocolError(f"audit: a share from 0 to 1 is needed, not {wish.audit}")
    if wish.local_repair and rule is not None and rule.name == "block":
        raise SettingsError(
            "repair: rule block judges a draft as a whole; it cannot repair single tokens (use truncate)"
        )
    kept = transcript.count(Provenance.KEPT)
    return Selective(
        prefix=wish.prefix,
        feature_mode=wish.feature_mode,
        features=unpack(wish.feature_mode, wish.features, kept, dim),
        local_repair=wish.local_repair,
        audit=round(wish.audit, 6),
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
