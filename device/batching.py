"""How many uncertain tokens a message should carry: what earns the most committed tokens a second."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BatchController"]


@dataclass(slots=True)
class BatchController:
    """Chooses the batch from the measured round trip, draft time, acceptance and share of uncertain tokens.

    When a draft is truncated at its first failure, every further uncertain token is worth less than the one before: it
    counts only if all before it stand. What it costs is drafting up to it; what it saves is a share of a round trip.
    With local repair nothing is dropped, so the longest batch is best.

    Args:
        longest: upper limit of a batch.
        local: failures are repaired in place.
        fixed: a batch that the user chose; 0 lets the controller choose.
        overlapped: drafts are made while verdicts fly.
        memory: weight of the past in running means.
    """

    longest: int
    local: bool = False
    fixed: int = 0
    overlapped: bool = False
    memory: float = 0.9
    token_seconds: float = 0.001
    round_seconds: float = 0.03
    acceptance: float = 0.7
    share: float = 0.3

    def batch(self) -> int:
        """Uncertain tokens that the next message should carry, at least 1."""
        if self.fixed or self.local:
            return self.fixed or self.longest
        return max(range(1, self.longest + 1), key=self.rate)

    def rate(self, batch: int) -> float:
        """Tokens a second that a batch is expected to commit.

        The first failure among `batch` uncertain tokens, each accepted with chance a, leaves (1 - a^batch) / (1 - a)
        of them committed on average, the failed one included since it is corrected; 1 / share tokens come with each.
        """
        chance = min(self.acceptance, 0.999)
        whole = chance**batch
        committed = (1.0 - whole) / (1.0 - chance)
        drafting = batch * self.token_seconds
        waiting = self.round_seconds * self.share
        in_turn, at_once = drafting + waiting, max(drafting, waiting)
        # What a pipelined device drafts meanwhile counts only if this batch stands whole.
        seconds = whole * at_once + (1.0 - whole) * in_turn if self.overlapped else in_turn
        return committed / seconds

    def drafted(self, tokens: int, uncertain: int, seconds: float) -> None:
        """A draft of so many tokens was made."""
        self.token_seconds = self._mean(self.token_seconds, seconds / tokens)
        self.share = max(0.01, self._mean(self.share, uncertain / tokens, tokens))

    def judged(self, accepted: int, failed: int, seconds: float) -> None:
        """A verdict came `seconds` after its draft was sent: uncertain tokens that stood, and that were replaced."""
        self.round_seconds = self._mean(self.round_seconds, seconds)
        if accepted + failed:
            self.acceptance = self._mean(self.acceptance, accepted / (accepted + failed), accepted + failed)

    def _mean(self, past: float, value: float, weight: int = 1) -> float:
        kept = self.memory**weight
        return kept * past + (1.0 - kept) * value
