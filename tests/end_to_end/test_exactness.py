"""Lossless rules give exactly the target's law, over real gRPC; and the test sees it when they do not.

The target is tiny, so its joint law over whole pictures is enumerated. A G-test compares it with the frequencies of
many generated pictures. Seeds are fixed, so a test passes or fails the same way each time.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from cloud import acceptance
from cloud.acceptance import Judgement, block_acceptance, inverse_sample, residual
from cloud.methods import verifier as verifying
from cloud.session import Session
from cloud.shadow_drafter import ShadowDrafter
from device.generation import Generation
from device.graphs import DeviceModels
from device.link import Link
from device.report import Report
from device.roles import DEVICE_ROLES
from shared import noise
from shared.bundle import Bundle
from shared.methods import find_method, find_rule
from shared.noise import Purpose
from shared.sampling import SamplingSettings, guide, warp
from tests.end_to_end.laws import PROMPT, SAMPLING, Law, fit, joint_law
from tests.end_to_end.serving import serving
from training.toy import write_toy_bundle

DRAFT_LENGTH = 5
SEED = 2
# Re-used draws bend the law little; with these weights they are seen in few pictures.
SEED_FOR_NOISE = 7
PICTURES = 800
PICTURES_WITH_BUG = 500
# Of a right rule, one in ten thousand sets of seeds would fail; the planted bugs are far below.
LEVEL = 1e-4


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Bundle, Law]]:
    """Toy bundles by the seed of their weights, each with its law."""

    @functools.cache
    def make(seed: int) -> tuple[Bundle, Law]:
        folder = tmp_path_factory.mktemp("toy") / "bundle"
        bundle = write_toy_bundle(folder, vocabulary=3, rows=2, cols=3, seed=seed, drafter_noise=1.0)
        return bundle, joint_law(bundle)

    return make


def generate(bundle: Bundle, rule: str, count: int, in_flight: int = 1) -> Counter[tuple[int, ...]]:
    """Draws pictures with seeds 0..count-1 by `sd` with a rule, over gRPC, eight at a time."""
    method = find_method("sd")
    found = find_rule(method, rule)
    local = threading.local()

    with serving(bundle) as address:

        def draw(seed: int) -> tuple[int, ...]:
            if not hasattr(local, "models"):
                local.models, local.link = DeviceModels(bundle), Link(address)
            report = Report("sd", rule, "lossless", seed, PROMPT)
            generation = Generation(
                local.models, method, found, PROMPT, seed, SAMPLING, report, local.link, DRAFT_LENGTH, in_flight
            )
            DEVICE_ROLES["drafter"](generation)
            return tuple(generation.transcript.tokens)

        with ThreadPoolExecutor(8) as pool:
            return Counter(pool.map(draw, range(count)))


@pytest.mark.parametrize(("rule", "in_flight"), [("gumbel", 1), ("mrs", 1), ("block", 1), ("block", 3)])
def test_rule_gives_the_targets_joint_law(toy: Callable[[int], tuple[Bundle, Law]], rule: str, in_flight: int) -> None:
    bundle, law = toy(SEED)
    assert fit(generate(bundle, rule, PICTURES, in_flight), law) > LEVEL


# -- planted bugs ---------------------------------------------------------------------------------------------------


def softmax_residual(draft_probs: torch.Tensor, target_probs: torch.Tensor, weight: object = 1.0) -> torch.Tensor:
    return torch.softmax(target_probs - draft_probs, -1)


def first_failure_block(
    draft_probs: torch.Tensor,
    target_probs: torch.Tensor,
    tokens: Sequence[int],
    accept: Sequence[float],
    resample: Sequence[float],
    bonus: bool,
) -> Judgement:
    a, thresholds = block_acceptance(draft_probs, target_probs, tokens)
    accepted = 0
    while accepted < len(tokens) and accept[accepted] < thresholds[accepted]:
        accepted += 1
    if accepted == len(tokens):
        return Judgement(accepted, inverse_sample(target_probs[accepted], resample[accepted]) if bonus else None)
    left = residual(draft_probs[accepted].double(), target_probs[accepted].double(), a[accepted])
    return Judgement(accepted, inverse_sample(left, resample[accepted]))


def unwarped_draft(self: ShadowDrafter, committed: Sequence[int], draft: Sequence[int]) -> np.ndarray:
    self._sampling = SamplingSettings()
    return RIGHT_SHADOW(self, committed, draft)


def unwarped_target(self: Session, rows: object) -> torch.Tensor:
    logits = rows.logits  # type: ignore[attr-defined]
    return warp(guide(logits[0], logits[1], SAMPLING.guidance), SamplingSettings())


def greedy_draft(self: Generation, position: int, log_probs: np.ndarray) -> int:
    return int(np.argmax(log_probs))


def same_draft_each_round(self: Generation, position: int, log_probs: np.ndarray) -> int:
    probs = np.exp(log_probs)
    uniform = noise.uniform(self.seed, Purpose.DRAFT, [position], 1)[0, 0]
    return int(np.searchsorted(np.cumsum(probs), uniform * probs.sum(), side="right"))


def same_uniforms_each_round(self: Session, purpose: Purpose, start: int, count: int) -> list[float]:
    return noise.uniform(self.request.seed, purpose, range(start, start + count), 1)[:, 0].tolist()


RIGHT_SHADOW: Callable[..., np.ndarray] = ShadowDrafter.probs
BUGS = {
    "residual by softmax, mrs": ("mrs", SEED, [(acceptance, "residual", softmax_residual)]),
    "residual by softmax, block": ("block", SEED, [(acceptance, "residual", softmax_residual)]),
    "stop at the first failure": ("block", SEED, [(verifying, "judge_block", first_failure_block)]),
    "draft rows not warped": ("mrs", SEED, [(ShadowDrafter, "probs", unwarped_draft)]),
    "target rows not warped": ("gumbel", SEED, [(Session, "_warped", unwarped_target)]),
    "greedy draft, soft ratio, mrs": ("mrs", SEED, [(Generation, "draw", greedy_draft)]),
    "greedy draft, soft ratio, block": ("block", SEED, [(Generation, "draw", greedy_draft)]),
    "noise keyed without the round": (
        "block",
        SEED_FOR_NOISE,
        [(Generation, "draw", same_draft_each_round), (Session, "uniforms", same_uniforms_each_round)],
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_seen(
    toy: Callable[[int], tuple[Bundle, Law]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    rule, seed, patches = BUGS[name]
    bundle, law = toy(seed)
    for owner, attribute, wrong in patches:
        monkeypatch.setattr(owner, attribute, wrong)
    count = PICTURES if seed == SEED_FOR_NOISE else PICTURES_WITH_BUG
    assert fit(generate(bundle, rule, count), law) < LEVEL
