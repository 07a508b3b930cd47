"""`ciar` through two programs: what is kept, what is judged, and that neither link nor mode changes a picture."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from cloud.methods import interval_verifier
from device.client import DeviceClient, GenerateSettings, Picture
from device.generation import Generation
from device.graphs import DeviceModels
from device.link import Link, LinkSettings
from device.report import Report
from device.roles import DEVICE_ROLES, selective
from device.selection import SelectionSettings
from shared.bundle import Bundle
from shared.errors import LinkError
from shared.graphs import DraftRows
from shared.methods import find_method, find_rule
from shared.sampling import probabilities
from shared.transcript import Provenance
from tests.end_to_end.laws import PROMPT, SAMPLING, Law, fit, mixed_law
from tests.end_to_end.programs import Verifier
from tests.end_to_end.relay import Relay, relaying
from tests.end_to_end.serving import serving
from training.toy import write_toy_bundle

MODES = ("sync", "batched", "pipelined")
LEVEL = 1e-4


def select(
    mode: str = "pipelined", level: float | None = None, repair: str = "truncate", **more: object
) -> SelectionSettings:
    """Settings with an absolute threshold, or with the quantile when no level is given."""
    kind = "quantile" if level is None else "absolute"
    return SelectionSettings(mode=mode, repair=repair, threshold_mode=kind, threshold=level, **more)  # type: ignore[arg-type]


def draw(device: DeviceClient, seed: int, selection: SelectionSettings, **more: object) -> Picture:
    return device.generate("a red cat", GenerateSettings("ciar", seed=seed, selection=selection, **more))  # type: ignore[arg-type]


def tokens(picture: Picture) -> list[int]:
    return picture.transcript.tokens


# -- the two ends of the scale --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [0, 1])
def test_when_everything_is_uncertain_the_picture_is_that_of_sd_and_ar(
    device: DeviceClient, mode: str, seed: int
) -> None:
    plain = tokens(device.generate("a red cat", GenerateSettings("ar", seed=seed)))
    assert tokens(device.generate("a red cat", GenerateSettings("sd", seed=seed))) == plain
    picture = draw(device, seed, select(mode, 0.0))
    assert tokens(picture) == plain
    assert picture.report.cloud_call_rate == 1.0


def test_when_nothing_is_uncertain_the_device_draws_alone_behind_the_prefix(device: DeviceClient) -> None:
    alone = tokens(device.generate("a red cat", GenerateSettings("device", seed=3)))
    picture = draw(device, 3, select(level=math.inf, prefix_rate=0.0))
    assert tokens(picture) == alone
    assert picture.report.cloud_call_rate == 0.0
    prefixed = draw(device, 3, select(level=math.inf, prefix_rate=0.25))
    plain = tokens(device.generate("a red cat", GenerateSettings("ar", seed=3)))
    assert tokens(prefixed)[:16] == plain[:16]
    assert prefixed.transcript.provenance == [Provenance.SAMPLED] * 16 + [Provenance.KEPT] * 48


# -- modes and links change no token --------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0.4, None])
@pytest.mark.parametrize("features", ["none", "scalars", "code64", "full"])
def test_modes_draw_the_same_picture(device: DeviceClient, features: str, level: float | None) -> None:
    for seed in (0, 1):
        pictures = [draw(device, seed, select(mode, level, features=features, audit=0.5)) for mode in MODES]
        assert len({tuple(tokens(picture)) for picture in pictures}) == 1
        assert len({tuple(picture.transcript.provenance) for picture in pictures}) == 1
        assert len({picture.report.selection.audited for picture in pictures if picture.report.selection}) == 1
        np.testing.assert_array_equal(pictures[0].scores, pictures[2].scores)


def test_drafts_of_several_rows_save_round_trips(device: DeviceClient) -> None:
    pictures = [draw(device, 3, select("batched", 0.4, "local", draft_rows=rows)) for rows in (2, 3, 8)]
    assert [picture.report.wire.round_trips for picture in pictures] == [4, 3, 1]


def test_how_far_a_truncated_draft_reached_changes_no_token(device: DeviceClient) -> None:
    pictures = [draw(device, 3, select("batched", 0.4, draft_rows=rows, batch=64)) for rows in (1, 2, 3, 8)]
    assert len({tuple(tokens(picture)) for picture in pictures}) == 1
    assert all(picture.report.draft.corrected > 0 for picture in pictures)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("level", [0.4, None])
@pytest.mark.parametrize("delay", [0.0, 0.02])
def test_drafting_on_under_local_repair_draws_the_picture_of_waiting(
    relayed: Relay, toy: Bundle, device: DeviceClient, level: float | None, delay: float, rows: int
) -> None:
    """What a repair changes in the drafts in flight is drawn again, what it leaves as it was stays."""
    relayed.delay = delay
    more = {"cloud_budget": 0.4, "audit": 0.5, "draft_rows": rows}
    drafts = {"in turn": 0, "ahead": 0}
    with DeviceClient(relayed.address, bundle=toy.folder) as far:
        for seed in range(4):
            waiting, ahead = (
                draw(where, seed, select(mode, level, "local", **more), in_flight=3)
                for where, mode in ((device, "batched"), (far, "pipelined"))
            )
            assert tokens(ahead) == tokens(waiting)
            assert ahead.transcript.provenance == waiting.transcript.provenance
            np.testing.assert_allclose(ahead.scores, waiting.scores, rtol=1e-3)
            assert waiting.report.draft.corrected > 0
            drafts["in turn"] += waiting.report.wire.round_trips
            drafts["ahead"] += ahead.report.wire.round_trips
    assert drafts["ahead"] > drafts["in turn"]  # some were drawn again


def test_features_reach_the_target(device: DeviceClient) -> None:
    """They are random in the toy bundle, so what the cloud says must change with them, in each mode differently."""
    drawn = {
        mode: tokens(draw(device, 5, select(level=0.4, features=mode)))
        for mode in ("none", "scalars", "code64", "full")
    }
    assert len({tuple(ids) for ids in drawn.values()}) == 4


def test_slow_link_changes_no_token(relayed: Relay, toy: Bundle, device: DeviceClient) -> None:
    relayed.delay = 0.02
    with DeviceClient(relayed.address, bundle=toy.folder) as far:
        for repair in ("truncate", "local"):
            near, slow = (draw(where, 4, select(level=0.4, repair=repair)) for where in (device, far))
            assert tokens(slow) == tokens(near)
            assert slow.report.wire.round_trips >= 1


@pytest.fixture
def relayed(exact: Verifier) -> Iterator[Relay]:
    with relaying(exact.port) as link:
        yield link


@pytest.mark.parametrize("repair", ["truncate", "local"])
@pytest.mark.parametrize("mode", MODES)
def test_cut_link_is_found_again_and_changes_no_token(
    relayed: Relay, toy: Bundle, device: DeviceClient, mode: str, repair: str
) -> None:
    selection = select(mode, 0.4, repair, features="scalars")
    plain = tokens(draw(device, 6, selection))
    waiting = [40, 20]

    def cut(done: int, total: int) -> None:
        if waiting and done >= waiting[-1]:
            waiting.pop()
            relayed.cut()

    with DeviceClient(relayed.address, bundle=toy.folder) as far:
        picture = far.generate("a red cat", GenerateSettings("ciar", seed=6, selection=selection), on_progress=cut)
    assert tokens(picture) == plain
    assert picture.report.resumed >= 1


# -- a link that stays lost -----------------------------------------------------------------------------------------


def lose_at(link: Relay, position: int) -> Callable[[int, int], None]:
    def watch(done: int, total: int) -> None:
        if done >= position:
            link.cut_for_good()

    return watch


@pytest.mark.parametrize("method", ["ciar", "sd", "ar"])
def test_device_finishes_alone_when_it_may(relayed: Relay, toy: Bundle, method: str) -> None:
    settings = GenerateSettings(method, seed=2, on_lost_link="finish-alone", selection=select(level=0.4))
    with DeviceClient(relayed.address, bundle=toy.folder) as far:
        picture = far.generate("a red cat", settings, on_progress=lose_at(relayed, 16))
    kinds = picture.transcript.provenance
    assert picture.transcript.complete
    assert picture.report.degraded == kinds.count(Provenance.DEGRADED) > 0
    assert picture.report.law == "lossy"
    first = kinds.index(Provenance.DEGRADED)
    assert not {Provenance.VERIFIED, Provenance.CORRECTED, Provenance.SAMPLED} & set(kinds[first:])
    assert (Provenance.KEPT in kinds[first:]) == (method == "ciar"), "what the device is sure of was never the cloud's"


def test_silent_cloud_is_given_up_at_the_deadline(relayed: Relay, toy: Bundle) -> None:
    settings = GenerateSettings(
        "ciar", seed=2, on_lost_link="finish-alone", verdict_seconds=0.3, selection=select(level=0.4)
    )
    with DeviceClient(relayed.address, bundle=toy.folder) as far:
        picture = far.generate("a red cat", settings, on_progress=lambda done, total: done >= 16 and relayed.stall())
    assert picture.report.degraded > 0


def test_lost_link_fails_at_once_when_that_was_asked(relayed: Relay, toy: Bundle) -> None:
    settings = GenerateSettings("ciar", seed=2, on_lost_link="fail", selection=select(level=0.4))
    with (
        DeviceClient(relayed.address, bundle=toy.folder, link=LinkSettings(retry_seconds=60)) as far,
        pytest.raises(LinkError),
    ):
        far.generate("a red cat", settings, on_progress=lose_at(relayed, 16))


@pytest.mark.parametrize("level", [0.4, None])
def test_without_any_verifier_the_device_may_draw_alone(toy: Bundle, deaf_port: int, level: float | None) -> None:
    settings = GenerateSettings("ciar", seed=2, on_lost_link="finish-alone", selection=select(level=level))
    with DeviceClient(f"127.0.0.1:{deaf_port}", bundle=toy.folder) as far:
        picture = far.generate("a red cat", settings)
    assert picture.transcript.count(Provenance.DEGRADED) > 0
    assert picture.transcript.count(Provenance.KEPT) > 0


# -- budget, counters, audit ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0.2, 0.4, 0.7])
def test_budget_is_held(device: DeviceClient, budget: float) -> None:
    rates = [
        draw(device, seed, select(repair="local", cloud_budget=budget)).report.cloud_call_rate for seed in range(12)
    ]
    assert abs(np.mean(rates) - budget) < 0.05


@pytest.mark.parametrize("repair", ["truncate", "local"])
def test_bytes_are_those_on_the_wire(relayed: Relay, toy: Bundle, repair: str) -> None:
    """Both ends count serialised messages; the link sees them with gRPC's framing around each."""
    with DeviceClient(relayed.address, bundle=toy.folder) as far:
        draw(far, 0, select(level=0.4))  # connection, headers and description are behind us
        up, down = relayed.bytes_up, relayed.bytes_down
        picture = draw(far, 1, select("sync", 0.0, repair, features="full", audit=1.0))
        wire = picture.report.wire
        up, down = relayed.bytes_up - up, relayed.bytes_down - down
    framing = 5 + 9  # gRPC's length prefix and the header of an HTTP/2 frame
    assert 0 <= up - wire.bytes_up - framing * wire.messages_up < 30 * wire.messages_up
    assert 0 <= down - wire.bytes_down - framing * wire.messages_down < 30 * wire.messages_down


def test_audit_estimates_what_keeping_cost(device: DeviceClient, toy: Bundle) -> None:
    """With every kept token audited, the estimate over many pictures is near zero only if the rows are alike."""
    reports = [draw(device, seed, select(level=0.4, audit=1.0)).report for seed in range(10)]
    kept = [report.selection.kept_tv for report in reports if report.selection and report.selection.kept_tv is not None]
    assert 0.05 < np.mean(kept) < 0.9
    assert all(r.selection and r.selection.audited == r.draft.kept_on_device for r in reports)


# -- the mixed law --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Law, float]:
    folder = tmp_path_factory.mktemp("tiny") / "bundle"
    bundle = write_toy_bundle(folder, vocabulary=3, rows=2, cols=3, seed=2, drafter_noise=1.0)
    return bundle, *mixed_law(bundle, prefix=1)


def pictures_of(bundle: Bundle, rule: str, selection: SelectionSettings, count: int) -> Counter[tuple[int, ...]]:
    method = find_method("ciar")
    found, local = find_rule(method, rule), threading.local()
    with serving(bundle) as address:

        def one(seed: int) -> tuple[int, ...]:
            if not hasattr(local, "models"):
                local.models, local.link = DeviceModels(bundle), Link(address)
            generation = Generation(
                local.models, method, found, PROMPT, seed, SAMPLING, Report("ciar", rule, "lossy", seed, PROMPT),
                local.link, selection=selection,
            )  # fmt: skip
            DEVICE_ROLES[method.device_role](generation)
            return tuple(generation.transcript.tokens)

        with ThreadPoolExecutor(8) as pool:
            return Counter(pool.map(one, range(count)))


@pytest.mark.parametrize(("rule", "mode"), [("gumbel", "pipelined"), ("mrs", "pipelined"), ("block", "batched")])
def test_picture_follows_the_mixed_law(tiny: tuple[Bundle, Law, float], rule: str, mode: str) -> None:
    """Exactly the target's rows at uncertain positions, exactly the drafter's at kept ones, whatever the rule."""
    bundle, law, level = tiny
    selection = select(mode, level, prefix_rate=0.17)
    assert fit(pictures_of(bundle, rule, selection, 800), law) > LEVEL


def test_mixed_law_sees_kept_tokens_that_were_judged_all_the_same(
    tiny: tuple[Bundle, Law, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_judged(session: object, chunk: object, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return session.draft_probs(chunk.tokens), probabilities(rows)  # type: ignore[attr-defined]

    monkeypatch.setattr(interval_verifier, "_mixed", all_judged)
    bundle, law, level = tiny
    assert fit(pictures_of(bundle, "mrs", select("batched", level, prefix_rate=0.17), 500), law) < LEVEL


def test_mixed_law_sees_a_decision_that_looked_at_the_drawn_token(
    tiny: tuple[Bundle, Law, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = selective._SelectiveDrafter._token

    def peeking(self: object, position: int, rows: DraftRows) -> object:
        token = right(self, position, rows)  # type: ignore[arg-type]
        token.uncertain = token.log_prob < math.log(0.5)
        return token

    monkeypatch.setattr(selective._SelectiveDrafter, "_token", peeking)
    bundle, law, level = tiny
    assert fit(pictures_of(bundle, "mrs", select("batched", level, prefix_rate=0.17), 500), law) < LEVEL
