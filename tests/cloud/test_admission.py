"""Admission: what a device asks for is checked whole before anything is computed, and refused with both values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import pytest
from tokenizers import Tokenizer

from cloud.admission import admit
from protos import PROTOCOL
from protos import ciar_pb2 as pb
from shared.bundle import Bundle
from shared.errors import BundleError, CiarError, ProtocolError, SettingsError
from shared.features import pack
from shared.graphs import CaptionEncoder
from shared.methods import METHODS, RULES
from shared.sampling import SamplingSettings
from shared.transcript import Provenance

PROMPT = "a red apple"
MakeOpen = Callable[..., pb.Open]


@pytest.fixture(scope="module")
def captions(toy_bundle: Bundle) -> CaptionEncoder:
    graph = onnxruntime.InferenceSession(str(toy_bundle.path("text_encoder.onnx")), providers=["CPUExecutionProvider"])
    return CaptionEncoder(graph, Tokenizer.from_file(str(toy_bundle.path("tokenizer.json"))), 12)


@pytest.fixture
def make_open(toy_bundle: Bundle) -> MakeOpen:
    """An opening that is acceptable, with fields changed."""

    def make(**fields: Any) -> pb.Open:
        manifest = toy_bundle.manifest
        acceptable = {
            "protocol": PROTOCOL,
            "bundle_digest": manifest.digest,
            "codebook_digest": manifest.codebook_digest,
            "rows": 2,
            "cols": 3,
            "vocabulary": 5,
            "generation": "picture-1",
            "prompt": PROMPT,
            "seed": 2**64 - 1,
            "method": "sd",
            "rule": "block",
            "sampling": pb.Sampling(temperature=0.7, top_k=4, top_p=0.95, guidance=3.3),
        }
        return pb.Open(**acceptable | fields)

    return make


@pytest.fixture
def ask(toy_bundle: Bundle, captions: CaptionEncoder, make_open: MakeOpen) -> Callable[..., Any]:
    return lambda **fields: admit(make_open(**fields), toy_bundle.manifest, captions)


def test_what_was_asked_arrives_as_it_was_meant(ask: Callable[..., Any], captions: CaptionEncoder) -> None:
    request = ask(tokens=[4, 0], provenance=b"\x00\x03", epoch=7)
    assert request.generation == "picture-1"
    assert request.seed == 2**64 - 1
    assert (request.method, request.rule) == (METHODS["sd"], RULES["block"])
    assert request.transcript.tokens == [4, 0]
    assert request.transcript.provenance == [Provenance.SAMPLED, Provenance.CORRECTED]
    assert request.epoch == 7
    assert request.bonus
    np.testing.assert_array_equal(request.features, captions.encode(PROMPT))


def test_sampling_survives_the_wires_float32(ask: Callable[..., Any]) -> None:
    """0.7 must not come back as 0.699999988: both sides warp with the same numbers."""
    assert ask().sampling == SamplingSettings(temperature=0.7, top_k=4, top_p=0.95, guidance=3.3)


def test_a_device_that_drafts_ahead_gets_no_bonus_tokens(ask: Callable[..., Any]) -> None:
    assert not ask(pipelined=True).bonus


def test_the_default_rule_is_taken_when_none_is_named(ask: Callable[..., Any]) -> None:
    assert ask(rule="").rule is RULES["gumbel"]
    assert ask(method="ar", rule="").rule is None


@pytest.mark.parametrize(
    ("field", "device", "verifier"),
    [
        ("protocol", 9, str(PROTOCOL)),
        ("rows", 7, "2x3"),
        ("cols", 7, "2x3"),
        ("vocabulary", 4096, "5"),
        ("bundle_digest", "feed" * 16, None),
        ("codebook_digest", "beef" * 16, None),
    ],
)
def test_another_bundle_is_refused_with_both_values_and_what_to_do(
    toy_bundle: Bundle, ask: Callable[..., Any], field: str, device: Any, verifier: str | None
) -> None:
    ours = verifier or getattr(toy_bundle.manifest, field.removeprefix("bundle_"))
    with pytest.raises(BundleError, match=rf"the device has .*{device}.*, the verifier {ours};.*--bundle"):
        ask(**{field: device})


def test_a_value_of_any_length_is_quoted_in_part(ask: Callable[..., Any]) -> None:
    with pytest.raises(BundleError) as refusal:
        ask(bundle_digest="x" * 100_000)
    assert len(str(refusal.value)) < 400


SAMPLING: dict[str, Any] = {"temperature": 0.7, "top_k": 4, "top_p": 0.95, "guidance": 3.3}


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"method": "eagle"}, SettingsError, "method: 'eagle' is unknown"),
        ({"method": ""}, SettingsError, "method: '' is unknown"),
        ({"method": "device", "rule": ""}, ProtocolError, "method device runs on the device alone"),
        ({"rule": "nearly"}, SettingsError, r"rule: method sd takes gumbel, mrs, block.*, not 'nearly'"),
        ({"method": "ar"}, SettingsError, "rule: method ar judges nothing"),
        ({"sampling": None}, SettingsError, "temperature: "),
        ({"sampling": pb.Sampling(**SAMPLING | {"temperature": float("nan")})}, SettingsError, "temperature: .*nan"),
        ({"sampling": pb.Sampling(**SAMPLING | {"temperature": 0})}, SettingsError, "temperature: "),
        ({"sampling": pb.Sampling(**SAMPLING | {"top_p": 1.5})}, SettingsError, "top_p: "),
        ({"sampling": pb.Sampling(**SAMPLING | {"guidance": float("inf")})}, SettingsError, "guidance: .*inf"),
        ({"prompt": " "}, SettingsError, "prompt: it is empty"),
        ({"prompt": "apple " * 11}, SettingsError, "prompt: 11 text tokens"),
        ({"prompt": "b" * 2001}, SettingsError, "prompt: 2001 characters"),
        ({"tokens": [1, 2], "provenance": b"\x00"}, ProtocolError, "2 tokens but 1 provenance bytes"),
        ({"tokens": [1, 5], "provenance": b"\x00\x00"}, ProtocolError, "token id 5 at position 1"),
        ({"tokens": [1], "provenance": b"\x09"}, ProtocolError, "provenance 9 at position 0"),
        ({"tokens": [1] * 7, "provenance": b"\x00" * 7}, ProtocolError, "exceed the 2x3 grid"),
        ({"epoch": 2**23}, ProtocolError, r"epoch: 0\.\.8388607 is allowed, not 8388608"),
    ],
)
def test_what_is_not_acceptable_is_refused_with_what_and_where(
    ask: Callable[..., Any], fields: dict[str, Any], kind: type[CiarError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        ask(**fields)


def test_a_whole_transcript_may_be_resumed(ask: Callable[..., Any]) -> None:
    assert ask(tokens=[1] * 6, provenance=b"\x02" * 6).transcript.complete


def test_a_name_of_any_length_is_cut_for_the_log(ask: Callable[..., Any]) -> None:
    assert ask(generation="n" * 1000).generation == "n" * 64


def test_the_largest_epoch_is_taken(ask: Callable[..., Any]) -> None:
    assert ask(epoch=2**23 - 1).epoch == 2**23 - 1


# -- a device that keeps tokens -------------------------------------------------------------------------------------


DIM = 16
WISH: dict[str, Any] = {"prefix": 1, "feature_mode": "scalars", "local_repair": True, "audit": 0.01}


@pytest.fixture
def ask_ciar(toy_bundle: Bundle, captions: CaptionEncoder, make_open: MakeOpen) -> Callable[..., Any]:
    """Asks for `ciar` at a verifier whose bundle knows three modes; `wish` changes fields of `Selective`."""

    def ask(wish: dict[str, Any] | None = None, **fields: Any) -> Any:
        fields = {"method": "ciar", "rule": "", "selective": pb.Selective(**WISH | (wish or {}))} | fields
        modes = ["scalars", "code64", "full"]
        return admit(make_open(**fields), toy_bundle.manifest, captions, DIM, modes)

    return ask


def test_what_a_selective_device_wants_arrives_as_it_was_meant(ask_ciar: Callable[..., Any]) -> None:
    request = ask_ciar({"prefix": 3, "audit": 0.3})
    assert request.rule is RULES["gumbel"]
    wish = request.selective
    assert (wish.prefix, wish.feature_mode, wish.local_repair) == (3, "scalars", True)
    assert wish.audit == 0.3, "float32 on the wire must not move a token in or out of the audit"
    assert wish.features.shape == (0, 3)


@pytest.mark.parametrize("mode", ["none", "scalars", "code64", "full"])
def test_a_resumed_picture_brings_features_of_its_kept_tokens_only(ask_ciar: Callable[..., Any], mode: str) -> None:
    width = {"none": 0, "scalars": 3, "code64": 64, "full": DIM}[mode]
    sent = np.arange(2 * width, dtype=np.float32).reshape(2, width) - 20.0
    kinds = bytes([Provenance.SAMPLED, Provenance.KEPT, Provenance.CORRECTED, Provenance.KEPT])
    request = ask_ciar({"feature_mode": mode, "features": pack(mode, sent)}, tokens=[0, 1, 2, 3], provenance=kinds)
    np.testing.assert_array_equal(request.selective.features, sent)


def test_other_methods_have_no_selection(ask: Callable[..., Any], ask_ciar: Callable[..., Any]) -> None:
    assert ask().selective is None
    assert ask_ciar(method="sd").selective is None


@pytest.mark.parametrize(("local", "rule"), [(True, "mrs"), (True, "gumbel"), (False, "block")])
def test_rules_that_go_with_a_repair_are_taken(ask_ciar: Callable[..., Any], local: bool, rule: str) -> None:
    assert ask_ciar({"local_repair": local}, rule=rule).rule is RULES[rule]


@pytest.mark.parametrize("audit", [0.0, 1.0])
@pytest.mark.parametrize("prefix", [0, 6])
def test_the_ends_of_the_ranges_are_taken(ask_ciar: Callable[..., Any], audit: float, prefix: int) -> None:
    wish = ask_ciar({"audit": audit, "prefix": prefix}).selective
    assert (wish.audit, wish.prefix) == (audit, prefix)


@pytest.mark.parametrize(
    ("wish", "fields", "kind", "message"),
    [
        ({}, {"selective": None}, ProtocolError, "method ciar: the Open message says nothing of what the device keeps"),
        ({"feature_mode": "code32"}, {}, SettingsError, "knows none, scalars, code64, full, not 'code32'"),
        ({"feature_mode": ""}, {}, SettingsError, "features: .* not ''"),
        ({"prefix": 7}, {}, ProtocolError, "prefix: at most 6 tokens are in the picture, not 7"),
        ({"audit": 1.5}, {}, ProtocolError, r"audit: a share from 0 to 1 is needed, not 1\.5"),
        ({"audit": -0.5}, {}, ProtocolError, r"audit: .* not -0\.5"),
        ({"audit": float("nan")}, {}, ProtocolError, "audit: .* not nan"),
        ({}, {"rule": "block"}, SettingsError, "repair: rule block judges a draft as a whole"),
        ({}, {"tokens": [1], "provenance": b"\x01"}, ProtocolError, "1 tokens in mode scalars take 6 bytes, 0 came"),
        ({"features": bytes(6)}, {}, ProtocolError, "0 tokens in mode scalars take 0 bytes, 6 came"),
        (
            {"features": b"\x00\x7e" * 3},
            {"tokens": [1], "provenance": b"\x01"},
            ProtocolError,
            "features: a number is not finite",
        ),
    ],
)
def test_what_a_selective_device_may_not_want_is_refused_with_what_and_where(
    ask_ciar: Callable[..., Any], wish: dict[str, Any], fields: dict[str, Any], kind: type[CiarError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        ask_ciar(wish, **fields)


def test_a_bundle_without_features_knows_mode_none_alone(
    toy_bundle: Bundle, captions: CaptionEncoder, make_open: MakeOpen
) -> None:
    plain = make_open(method="ciar", rule="", selective=pb.Selective(feature_mode="none"))
    assert admit(plain, toy_bundle.manifest, captions).selective is not None
    other = make_open(method="ciar", rule="", selective=pb.Selective(feature_mode="scalars"))
    with pytest.raises(SettingsError, match="features: the verifier's bundle knows none, not 'scalars'"):
        admit(other, toy_bundle.manifest, captions)
