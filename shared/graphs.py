"""The ONNX graphs that run on both sides: the caption encoder and the drafter with its cache.

The device drafts with them; the cloud encodes the same captions and recomputes draft rows (its shadow drafter). Both
must do it with the same code, so it lives here and takes the inference session as an argument: this room does not
import onnxruntime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shared.errors import BundleError, SettingsError

__all__ = ["MAX_PROMPT_CHARACTERS", "CaptionEncoder", "DraftRows", "DrafterCache", "Graph", "Tokenizer"]

MAX_PROMPT_CHARACTERS = 2000

Floats = NDArray[np.float32]

_DETAIL = ("radius", "hidden", "measures")


class Graph(Protocol):
    """What is used of an `onnxruntime.InferenceSession`."""

    def run(self, output_names: Sequence[str] | None, input_feed: dict[str, Any]) -> list[Any]: ...

    def get_inputs(self) -> list[Any]: ...

    def get_outputs(self) -> list[Any]: ...


class Tokenizer(Protocol):
    """What is used of a `tokenizers.Tokenizer`."""

    def encode(self, sequence: str) -> Any: ...


class CaptionEncoder:
    """Turns a prompt into the feature rows that condition drafter and target.

    Args:
        graph: text encoder: input_ids, attention_mask [, token_type_ids] -> last_hidden_state.
        tokenizer: its tokenizer, without padding or truncation.
        max_rows: text tokens a prompt may have, including the two that mark its ends.
    """

    def __init__(self, graph: Graph, tokenizer: Tokenizer, max_rows: int) -> None:
        self._graph, self._tokenizer, self.max_rows = graph, tokenizer, max_rows
        self._inputs = {item.name for item in graph.get_inputs()}

    def encode(self, prompt: str) -> Floats:
        """Feature rows (length, width) of a prompt, float32.

        Raises:
            SettingsError: the prompt is empty or too long.
        """
        ids = self._ids(prompt)
        ones = np.ones((1, len(ids)), np.int64)
        feeds = {"input_ids": np.array([ids], np.int64), "attention_mask": ones, "token_type_ids": ones * 0}
        (features,) = self._graph.run(["last_hidden_state"], {k: v for k, v in feeds.items() if k in self._inputs})
        return np.ascontiguousarray(features[0], dtype=np.float32)

    def check(self, prompt: str) -> None:
        """Raises SettingsError as `encode` does, without encoding."""
        self._ids(prompt)

    def _ids(self, prompt: str) -> list[int]:
        if not prompt.strip():
            raise SettingsError("prompt: it is empty; say what to draw")
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise SettingsError("prompt: it is not valid text; give it in the terminal's encoding (UTF-8)")
        if len(prompt) > MAX_PROMPT_CHARACTERS:
            raise SettingsError(f"prompt: {len(prompt)} characters; at most {MAX_PROMPT_CHARACTERS} are allowed")
        ids: list[int] = self._tokenizer.encode(prompt).ids
        if len(ids) > self.max_rows:
            raise SettingsError(
                f"prompt: {len(ids) - 2} text tokens; this bundle's models read at most {self.max_rows - 2}; shorten it"
            )
        return ids


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Outputs of the drafter for n rows. Without detail, all but the centre have width 0: (n, 0).

    Args:
        centre: logits (n, V); they imitate the target's guided logits.
        radius: half-width of the logit interval, (n, V), or (n, 1) for one radius a token; at least 0.
        hidden: last hidden states (n, dim).
        measures: `shared.intervals.interval_measures` of the rows at the cache's temperature, (n, 3): Omega, Sigma,
            entropy.
    """

    centre: Floats
    radius: Floats
    hidden: Floats
    measures: Floats

    def only(self, index: int) -> DraftRows:
        """Row number `index` alone."""
        part = slice(index, index + 1)
        return DraftRows(self.centre[part], self.radius[part], self.hidden[part], self.measures[part])


class DrafterCache:
    """One generation's drafter: feeds rows, keeps keys and values, rolls back.

    The graph takes `caption` (1, p, width), `caption_length` (1,), `tokens` (1, n), `past_i` (1, past, width_i) for
    each cached tensor, `detail_rows` (1,), `temperature` (1,) and, where the drafter has a caption summary,
    `caption_mean` (1, width): the mean of the caption's rows, in every call. It gives `centre` for the p + n rows,
    `radius`, `hidden` and `measures` for the last `detail_rows` of them, and `present_i`, their new rows.

    Args:
        graph: the drafter.
        prefix_rows: conditioning rows.
        size: tokens of a picture.
        detail: whether rows come with radius, hidden state and measures. Without, they are not computed.
        temperature: at which tokens are drawn, for the measures; graphs that were exported without such an input
            measure at temperature 1, as their calibration does.

    Raises:
        BundleError: detail is wanted, but the graph was exported before there were interval measures.
    """

    def __init__(
        self, graph: Graph, prefix_rows: int, size: int, detail: bool = False, temperature: float = 1.0
    ) -> None:
        self._graph, self.detail = graph, detail
        self._prefix_rows, self._size = prefix_rows, size
        shapes = {item.name: item.shape for item in graph.get_inputs()}
        if detail and "measures" not in {item.name for item in graph.get_outputs()}:
            raise BundleError(
                "this bundle's drafter has no interval measures, which this method needs; export the bundle again "
                "(ciar-train export) or use one that has them"
            )
        self._width = shapes["caption"][2]
        self._names = sorted((n for n in shapes if n.startswith("past_")), key=lambda n: int(n.removeprefix("past_")))
        self._past = [np.zeros((1, prefix_rows + size, shapes[name][2]), np.float32) for name in self._names]
        # Older graphs give radius and hidden states of all rows, and have no such input.
        self._counts_detail = "detail_rows" in shapes
        self._wants_mean = "caption_mean" in shapes
        self._temperature = np.array([temperature], np.float32) if "temperature" in shapes else None
        self._mean = np.zeros((1, self._width), np.float32)
        present = [name.replace("past_", "present_") for name in self._names]
        self._outputs = ["centre", *(_DETAIL if detail else ()), *present]
        self._rows = 0

    @property
    def length(self) -> int:
        """Tokens that were fed and not rolled back; 0 before and after the prompt is fed."""
        return max(0, self._rows - self._prefix_rows)

    def prefill(self, features: Floats, tokens: Sequence[int] = ()) -> DraftRows:
        """Feeds a caption (length, width), and committed tokens if there are any, from scratch.

        Returns the rows that predict positions 0..len(tokens).
        """
        self._rows = 0
        caption = np.zeros((1, self._prefix_rows, self._width), np.float32)
        caption[0, : len(features)] = features
        self._mean = features.mean(0, dtype=np.float32, keepdims=True)
        return self._run(caption, len(features), tokens)

    def feed(self, tokens: Sequence[int]) -> DraftRows:
        """Feeds n tokens; returns the n rows that predict the positions behind each.

        Raises:
            ValueError: no caption was fed yet.
        """
        if not self._rows:
            raise ValueError("tokens were fed before the caption: call prefill first")
        return self._run(np.zeros((1, 0, self._width), np.float32), 0, tokens)

    def truncate(self, length: int) -> None:
        """Rolls back to `length` fed tokens.

        Raises:
            ValueError: fewer tokens were fed.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot roll the drafter back to {length} of {self.length} tokens")
        self._rows = self._prefix_rows + length

    def _run(self, caption: Floats, caption_length: int, tokens: Sequence[int]) -> DraftRows:
        feeds: dict[str, Any] = {
            "caption": caption,
            "caption_length": np.array([caption_length], np.int64),
            "tokens": np.array(tokens, np.int64).reshape(1, -1),
        }
        feeds |= {name: past[:, : self._rows] for name, past in zip(self._names, self._past, strict=True)}
        first = max(0, caption.shape[1] - 1)  # of the rows that predict a position
        count = caption.shape[1] + len(tokens) - first
        if self._counts_detail:
            feeds["detail_rows"] = np.array([count if self.detail else 0], np.int64)
        if self._temperature is not None:
            feeds["temperature"] = self._temperature
        if self._wants_mean:
            feeds["caption_mean"] = self._mean
        outputs = self._graph.run(self._outputs, feeds)
        self._keep(outputs[-len(self._past) :], caption.shape[1] + len(tokens))
        none = np.zeros((count, 0), np.float32)
        details = [rows[0] for rows in outputs[1 : 1 + len(_DETAIL)]] if self.detail else [none] * len(_DETAIL)
        return DraftRows(outputs[0][0, first:], *details)

    def _keep(self, present: Sequence[Floats], count: int) -> None:
        """Appends the new rows of keys and values to the cache."""
        stop = self._rows + count
        for past, new in zip(self._past, present, strict=True):
            past[:, self._rows : stop] = new
        self._rows = stop
