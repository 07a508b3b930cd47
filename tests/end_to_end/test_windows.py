"""`sjd`, `csd` and relaxed rules through two programs."""

from __future__ import annotations

import json

import numpy as np
import pytest

from device.client import DeviceClient, GenerateSettings, Picture
from shared.bundle import Bundle
from shared.methods import METHODS
from shared.transcript import Provenance
from shared.windows import INITS, WindowSettings
from tests.end_to_end.programs import Client, Verifier
from tests.end_to_end.relay import relaying

PROMPT = "a red cat"
RELAXED = [name for name in METHODS["sd"].rules if name not in ("gumbel", "mrs", "block")]


def draw(device: DeviceClient, method: str, rule: str = "", seed: int = 0, **more: object) -> Picture:
    return device.generate(PROMPT, GenerateSettings(method, rule, seed, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize("init", INITS)
def test_shared_noise_gives_the_picture_of_ar_in_fewer_passes(device: DeviceClient, init: str) -> None:
    plain = draw(device, "ar")
    window = draw(device, "sjd", "gumbel", window=WindowSettings(16, "continue", init))
    assert window.transcript.tokens == plain.transcript.tokens
    assert window.report.cloud.forwards < plain.report.cloud.forwards == 64
    assert window.report.law == "lossless"
    assert window.report.tv_cost == window.report.relaxed == 0


def test_cut_link_changes_no_token_of_a_window_with_shared_noise(exact: Verifier, toy: Bundle) -> None:
    with DeviceClient(exact.address, bundle=toy.folder) as near:
        plain = draw(near, "ar").transcript.tokens
    with relaying(exact.port) as link, DeviceClient(link.address, bundle=toy.folder) as far:
        waiting = [40, 16]

        def cut(done: int, total: int) -> None:
            if waiting and done >= waiting[-1]:
                waiting.pop()
                link.cut()

        picture = far.generate(PROMPT, GenerateSettings("sjd", "gumbel", 0), on_progress=cut)
    assert picture.transcript.tokens == plain
    assert picture.report.resumed >= 1


def test_csd_without_relaxation_is_sjd(device: DeviceClient) -> None:
    strict = draw(device, "sjd").transcript.tokens
    for option in ("lambda", "delta"):
        assert draw(device, "csd", rule_options={option: 0.0}).transcript.tokens == strict


def test_csd_says_what_it_relaxed_and_what_that_may_have_cost(device: DeviceClient) -> None:
    pictures = [draw(device, "csd", seed=seed, rule_options={"lambda": 2.0, "delta": 0.9}) for seed in range(6)]
    assert sum(picture.report.relaxed for picture in pictures) > 0
    for picture in pictures:
        report = picture.report
        assert report.law == "lossy"
        assert report.relaxed == picture.transcript.count(Provenance.RELAXED)
        assert report.tv_cost is not None
        assert report.tv_cost > 0
        assert np.nanmin(picture.scores) >= 0
        assert np.nanmax(picture.scores) <= 1
        assert not np.isnan(picture.scores).any()
        assert 0 < report.seconds.first_row <= report.seconds.total


@pytest.mark.parametrize("rule", RELAXED)
@pytest.mark.parametrize("method", ["sd", "sjd"])
def test_every_relaxed_rule_draws_with_drafts_and_with_windows(device: DeviceClient, method: str, rule: str) -> None:
    report = draw(device, method, rule, seed=3).report
    assert report.law == "lossy"
    assert (report.tv_cost is None) == (rule in ("gsd", "lantern"))
    assert report.draft.accepted + report.draft.corrected <= 64
    assert (report.draft.proposed > 0) == (method == "sd")


def test_command_line_takes_windows_and_rule_options(client: Client) -> None:
    flags = "--method csd --rule-option delta=0.5 --window 8 --window-init left --json --overlay"
    report = json.loads(client.run(*flags.split()).stdout)
    assert report["method"] == report["rule"] == "csd"
    assert (client.folder / "picture.overlay.png").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--rule-option", "delta"), "NAME=NUMBER"),
        (("--rule-option", "delta=2"), "delta: 0 to 1"),
        (("--rule-option", "epsilon=0.1"), "it takes lambda, delta"),
        (("--window", "1"), "window: 2 to 256"),
        (("--window-init", "below"), "uniform, left, above, mix, drafter"),
        (("--after-rejection", "perhaps"), "continue, stop"),
    ],
)
def test_bad_window_flags_are_named(client: Client, flags: tuple[str, str], words: str) -> None:
    client.run("--method", "csd", *flags).failed(2, words)
