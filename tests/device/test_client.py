"""The device's public API: one call, one picture, and settings that say what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from device import client
from device.client import DeviceClient, GenerateSettings
from device.link import LinkSettings
from device.selection import SelectionSettings
from protos import ciar_pb2 as pb
from shared.bundle import Bundle
from shared.errors import BundleError, LinkError, SettingsError
from shared.sampling import SamplingSettings
from shared.transcript import Provenance
from tests.device.conftest import FakeVerifier

ALONE = GenerateSettings("device", seed=7)


@pytest.fixture
def device(toy: Bundle) -> Iterator[DeviceClient]:
    """A device whose server does not exist."""
    with DeviceClient("127.0.0.1:1", bundle=toy.folder) as result:
        yield result


def sampling_row_by_row(messages: Iterator[pb.DeviceMessage], context: Any) -> Iterator[pb.CloudMessage]:
    """A verifier of `ar` that sends tokens 0, 1, 2, ... row by row."""
    next(messages)
    yield pb.CloudMessage(opened=pb.Opened())
    for start in range(0, 16, 4):
        ids = [position % 8 for position in range(start, start + 4)]
        yield pb.CloudMessage(tokens=pb.Tokens(start=start, ids=ids))
    yield pb.CloudMessage(done=pb.Done())


# -- pictures -------------------------------------------------------------------------------------------------------


def test_device_alone_asks_no_verifier(device: DeviceClient) -> None:
    picture = device.generate("a cat", ALONE)
    assert picture.pixels.shape == (32, 32, 3)
    assert picture.pixels.dtype == np.uint8
    assert picture.transcript.complete
    assert picture.transcript.count(Provenance.KEPT) == 16
    assert (picture.report.method, picture.report.law, picture.report.wire.bytes_up) == ("device", "lossy", 0)


def test_same_seed_gives_the_same_picture_whatever_was_drawn_before(device: DeviceClient) -> None:
    first = device.generate("a cat", ALONE)
    other = device.generate("a cat", GenerateSettings("device", seed=8))
    again = device.generate("a cat", ALONE)
    assert again.transcript.tokens == first.transcript.tokens != other.transcript.tokens
    assert np.array_equal(again.pixels, first.pixels)


def test_prompt_changes_the_picture(device: DeviceClient) -> None:
    tokens = {tuple(device.generate(prompt, ALONE).transcript.tokens) for prompt in ("a cat", "a red car", "the sky")}
    assert len(tokens) == 3


def test_seed_of_the_system_is_reported_and_makes_the_picture_again(device: DeviceClient) -> None:
    first = device.generate("a cat", GenerateSettings("device"))
    again = device.generate("a cat", GenerateSettings("device", seed=first.report.seed))
    assert again.transcript.tokens == first.transcript.tokens
    assert device.generate("a cat", GenerateSettings("device")).report.seed != first.report.seed


def test_progress_and_preview_follow_the_picture(device: DeviceClient) -> None:
    progress: list[tuple[int, int]] = []
    previews: list[tuple[Any, int]] = []
    picture = device.generate(
        "a cat",
        ALONE,
        on_progress=lambda done, total: progress.append((done, total)),
        on_preview=lambda pixels, rows: previews.append((pixels, rows)),
    )
    assert progress == [(done, 16) for done in range(1, 17)]
    assert [rows for _, rows in previews] == [1, 2, 3, 4]
    assert all(pixels.shape == (32, 32, 3) for pixels, _ in previews)
    assert not np.array_equal(previews[0][0], picture.pixels)
    assert np.array_equal(previews[-1][0], picture.pixels)


def test_viewer_shows_what_the_verifier_sampled(fake: FakeVerifier, toy: Bundle) -> None:
    fake.talk = sampling_row_by_row
    rows: list[int] = []
    with DeviceClient(fake.address, bundle=toy.folder) as device:
        picture = device.generate("a cat", GenerateSettings("ar"), on_preview=lambda pixels, done: rows.append(done))
    assert picture.transcript.tokens == [position % 8 for position in range(16)]
    assert picture.transcript.count(Provenance.SAMPLED) == 16
    assert rows == [1, 2, 3, 4]
    assert (picture.report.rule, picture.report.cloud_call_rate, picture.report.wire.round_trips) == (None, 1.0, 1)


def test_error_of_a_callback_reaches_the_caller(device: DeviceClient) -> None:
    def broken(done: int, total: int) -> None:
        raise RuntimeError("the bar broke")

    with pytest.raises(RuntimeError, match="the bar broke"):
        device.generate("a cat", ALONE, on_progress=broken)
    assert device.generate("a cat", ALONE).transcript.complete


# -- bundles --------------------------------------------------------------------------------------------------------


def test_bundle_is_fetched_once(fake: FakeVerifier, tmp_path: Path) -> None:
    fake.talk = sampling_row_by_row
    with DeviceClient(fake.address, cache=tmp_path / "mine") as device:
        for _ in range(2):
            assert device.generate("a cat", GenerateSettings("ar")).transcript.complete
    assert fake.described == 1  # the second time the picture itself would be refused
    assert len(list((tmp_path / "mine").iterdir())) == 1


def test_device_alone_fetches_a_bundle_when_it_has_none_and_then_needs_nobody(
    fake: FakeVerifier, tmp_path: Path
) -> None:
    with DeviceClient(fake.address, cache=tmp_path / "mine") as device:
        first = device.generate("a cat", ALONE)
    with DeviceClient("127.0.0.1:1", cache=tmp_path / "mine") as device:
        again = device.generate("a cat", ALONE)
    assert again.transcript.tokens == first.transcript.tokens


def test_device_alone_without_bundle_or_verifier_says_so(tmp_path: Path) -> None:
    with DeviceClient("127.0.0.1:1") as device, pytest.raises(LinkError, match="cannot reach a verifier"):
        device.generate("a cat", ALONE)


def test_bundle_of_another_verifier_is_noticed_before_anything_is_sent(fake: FakeVerifier, toy: Bundle) -> None:
    fake.bundle_digest = "ab" * 32
    with (
        DeviceClient(fake.address, bundle=toy.folder) as device,
        pytest.raises(BundleError, match=rf"this is bundle {toy.manifest.digest[:12]}, but .* runs abababababab"),
    ):
        device.generate("a cat")


def test_missing_bundle_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no bundle there"):
        DeviceClient(bundle=tmp_path / "nothing")


# -- interval features ----------------------------------------------------------------------------------------------


def accepting_everything(openings: list[pb.Open]) -> Any:
    """A verifier of `ciar` that lets every draft stand, and remembers how pictures were opened."""

    def talk(messages: Iterator[pb.DeviceMessage], context: Any) -> Iterator[pb.CloudMessage]:
        openings.append(next(messages).open)
        yield pb.CloudMessage(opened=pb.Opened())
        for message in messages:
            draft = message.draft
            yield pb.CloudMessage(verdict=pb.Verdict(start=draft.start, accepted=len(draft.ids)))
            if draft.start + len(draft.ids) == 16:
                yield pb.CloudMessage(done=pb.Done())

    return talk


@pytest.fixture
def knowing(fake: FakeVerifier, toy: Bundle, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceClient]:
    """A device whose bundle knows two modes of features and recommends the smaller."""
    facts = {"feature_modes": ["scalars", "code64"], "recommended_features": "scalars"}
    with DeviceClient(fake.address, bundle=toy.folder) as device:
        assert device._models is not None
        monkeypatch.setitem(device._models.bundle.manifest.models, "interval", facts)
        yield device


@pytest.mark.parametrize("mode", ["", "none", "scalars", "code64"])
def test_features_are_those_asked_for_or_what_the_bundle_recommends(
    fake: FakeVerifier, knowing: DeviceClient, mode: str
) -> None:
    openings: list[pb.Open] = []
    fake.talk = accepting_everything(openings)
    chosen = SelectionSettings(features=mode, prefix_rate=0.0, audit=0.0)
    picture = knowing.generate("a cat", GenerateSettings("ciar", seed=7, selection=chosen))
    wanted = mode or "scalars"
    assert openings[0].selective.feature_mode == wanted
    assert picture.report.selection is not None
    assert picture.report.selection.features == wanted
    assert picture.scores.shape == (4, 4)
    assert np.isfinite(picture.scores).all()


def test_features_that_the_bundle_was_not_trained_for_are_refused_before_a_stream_is_opened(
    fake: FakeVerifier, knowing: DeviceClient
) -> None:
    openings: list[pb.Open] = []
    fake.talk = accepting_everything(openings)
    chosen = SelectionSettings(features="full")
    with pytest.raises(SettingsError, match="features: this bundle knows none, scalars, code64, not 'full'"):
        knowing.generate("a cat", GenerateSettings("ciar", selection=chosen))
    assert not openings


# -- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"method": "magic"}, "method"),
        ({"rule": "luck"}, "rule"),
        ({"method": "ar", "rule": "mrs"}, "rule"),
        ({"method": "device", "rule": "gumbel"}, "rule"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"draft_length": -1}, "draft_length"),
        ({"draft_length": 65}, "draft_length"),
        ({"in_flight": -1}, "in_flight"),
        ({"in_flight": 9}, "in_flight"),
        ({"on_lost_link": "panic"}, "on_lost_link"),
        ({"verdict_seconds": 0.0}, "verdict_seconds"),
        ({"verdict_seconds": 3601.0}, "verdict_seconds"),
        ({"verdict_seconds": float("nan")}, "verdict_seconds"),
        ({"method": "ciar", "rule": "block"}, "repair"),
        ({"method": "ciar", "rule": "mrs", "selection": SelectionSettings(mode="pipelined")}, "repair"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"guidance": 0.5}, "guidance"),
    ],
)
def test_setting_that_cannot_be_is_named(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(SettingsError, match=f"^{name}: "):
        GenerateSettings(**settings)


def test_rule_and_repair_need_to_fit_only_where_tokens_are_kept() -> None:
    assert GenerateSettings("sd", rule="block").selection.repair == "local"
    assert GenerateSettings("ciar", rule="block", selection=SelectionSettings(repair="truncate")).rule == "block"


@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_seeds_reach_from_end_to_end(device: DeviceClient, seed: int) -> None:
    assert device.generate("a cat", GenerateSettings("device", seed=seed)).report.seed == seed


def test_what_is_not_set_is_the_bundles_default() -> None:
    defaults = SamplingSettings(temperature=0.7, top_k=50, top_p=0.9, guidance=3.0)
    assert GenerateSettings().sampling(defaults) == defaults
    given = GenerateSettings(top_k=0, guidance=1.0).sampling(defaults)
    assert given == SamplingSettings(temperature=0.7, top_k=0, top_p=0.9, guidance=1.0)


def test_prompt_is_checked_before_a_verifier_is_troubled(fake: FakeVerifier, toy: Bundle) -> None:
    def talk(messages: Iterator[pb.DeviceMessage], context: Any) -> Iterator[pb.CloudMessage]:
        raise AssertionError("a stream was opened")

    fake.talk = talk
    with DeviceClient(fake.address, bundle=toy.folder, link=LinkSettings(retry_seconds=0.1)) as device:
        for prompt in ("", " \n", "cat " * 40, "a" * 2001, "a \udcff cat"):
            with pytest.raises(SettingsError, match=r"^prompt: "):
                device.generate(prompt)


@pytest.mark.parametrize("threads", [0, -1])
def test_threads_are_at_least_one(threads: int) -> None:
    with pytest.raises(SettingsError, match="threads"):
        DeviceClient(threads=threads)


def test_public_names_are_there() -> None:
    assert all(hasattr(client, name) for name in client.__all__)
    assert {"DeviceClient", "GenerateSettings", "Picture"} <= set(client.__all__)
