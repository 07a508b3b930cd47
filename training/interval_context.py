"""What the cloud sees of a picture whose device keeps its sure drafts: tokens, and what is told of the kept ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cloud.models.drafter import Drafter
from cloud.models.interval_adapter import IntervalFeatures
from shared.features import feature_width, interval_scalars
from training.captioned_tokens import CaptionedTokens
from training.uncertainty import row_scores

__all__ = ["KeptDrafts", "SplitModes", "feature_vectors", "keep_drafts"]


@dataclass(frozen=True, slots=True)
class KeptDrafts:
    """A context as the cloud sees it.

    Args:
        tokens: drafts where kept, else the clean tokens (batch, T).
        kept: which (batch, T).
        hidden: the drafter's hidden states (batch, T, draft_dim).
        scalars: `interval_scalars` of the drafts (batch, T, 7).
    """

    tokens: Tensor
    kept: Tensor
    hidden: Tensor
    scalars: Tensor


@torch.no_grad()
def keep_drafts(
    drafter: Drafter, batch: CaptionedTokens, score: str, budget: float, prefix_rate: float, temperature: float = 1.0
) -> KeptDrafts:
    """Replaces the tokens a device would keep by its drafts, drawn under teacher forcing.

    Kept are tokens behind the prefix whose score is under the (1 - budget) quantile of their picture.

    Args:
        score: which of the scores that `row_scores` knows.
        budget: share of the tokens behind the prefix that are not kept.
        prefix_rate: share of the tokens that the cloud draws first.
        temperature: at which drafts are drawn and scored.
    """
    rows, clean = drafter(*batch), batch[2]
    log_probs, radius = rows.centre.float().log_softmax(-1), rows.radius.float()
    noise = -torch.empty_like(log_probs).exponential_().log()
    drafts = (log_probs / temperature + noise).argmax(-1)
    scores = row_scores(log_probs, radius, temperature)[score]
    first = math.floor(prefix_rate * clean.shape[1])
    level = torch.quantile(scores[:, first:], 1.0 - budget, dim=1, keepdim=True)
    kept = scores <= level
    kept[:, :first] = False
    hidden, scalars = rows.hidden.float(), interval_scalars(log_probs, radius, drafts)
    return KeptDrafts(torch.where(kept, drafts, clean), kept, hidden, scalars)


def feature_vectors(features: IntervalFeatures, mode: str, hidden: Tensor, scalars: Tensor) -> Tensor:
    """What a mode adds to embeddings (..., dim): encoder, wire and adapter, as device and cloud apply them."""
    if mode in features.encoders:
        sent = features.encoders[mode](hidden, scalars)
    else:
        sent = scalars[..., : feature_width(mode, features.to_dict()["dim"])]
    vectors: Tensor = features.adapters[mode](sent)
    return vectors


class SplitModes(nn.Module):
    """Sends picture i of a batch through mode i modulo their number, so that one pass trains all modes."""

    def __init__(self, features: IntervalFeatures) -> None:
        super().__init__()
        self.features = features

    def forward(self, context: KeptDrafts) -> Tensor:
        """Vectors (batch, T, dim), zero where a token was not kept."""
        modes = self.features.modes
        vectors = context.hidden.new_zeros(*context.kept.shape, self.features.to_dict()["dim"])
        for number, mode in enumerate(modes):
            hidden, scalars = context.hidden[number :: len(modes)], context.scalars[number :: len(modes)]
            vectors[number :: len(modes)] = feature_vectors(self.features, mode, hidden, scalars).float()
        return vectors * context.kept.unsqueeze(-1)
