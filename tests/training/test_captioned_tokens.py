"""What a target is fed: captions dropped and contexts corrupted in the shares asked for."""

from __future__ import annotations

import pytest
import torch

from cloud.models.transformer import UNREAD
from training.captioned_tokens import corrupt_context, drop_captions, drop_context

VOCABULARY = 50


def tokens(pictures: int = 400, length: int = 100) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randint(VOCABULARY, (pictures, length))


def test_no_share_leaves_every_token() -> None:
    true = tokens()
    assert torch.equal(corrupt_context(true, 0.0, VOCABULARY), true)


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_a_share_of_the_pictures_is_touched_each_in_its_own_part(share: float) -> None:
    true = tokens()
    fed = corrupt_context(true, share, VOCABULARY)
    assert fed.shape == true.shape
    assert 0 <= int(fed.min()) <= int(fed.max()) < VOCABULARY
    parts = (fed != true).float().mean(1) * VOCABULARY / (VOCABULARY - 1)  # a random token may be the true one
    assert float((parts > 0).float().mean()) == pytest.approx(share, abs=0.08)
    touched = parts[parts > 0]
    assert float(touched.mean()) == pytest.approx(0.5, abs=0.08)
    assert float(touched.std()) == pytest.approx(12**-0.5, abs=0.05)  # uniform between none and all


def test_captions_are_dropped_in_the_share_asked_for() -> None:
    lengths = torch.full((2000,), 7)
    dropped = drop_captions(lengths, 0.1)
    assert set(dropped.tolist()) == {0, 7}
    assert float((dropped == 0).float().mean()) == pytest.approx(0.1, abs=0.03)


def test_contexts_are_dropped_whole_in_the_share_asked_for() -> None:
    true = tokens()
    fed = drop_context(true, 0.4)
    gone = (fed == UNREAD).all(1)
    assert float(gone.float().mean()) == pytest.approx(0.4, abs=0.08)
    assert torch.equal(fed[~gone], true[~gone])
    assert torch.equal(drop_context(true, 0.0), true)
