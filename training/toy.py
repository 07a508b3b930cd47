"""A complete bundle of tiny random models, for tests: milliseconds a picture, every distribution can be enumerated.

The files are written by the same code as a trained bundle. Rows are far from uniform and depend on caption and
tokens; the drafter's law differs from the target's by a total variation that `drafter_noise` sets.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn
from transformers import BertConfig, BertModel

from cloud.models.drafter import Drafter, DrafterConfig
from cloud.models.image_codec import ImageCodec, ImageCodecConfig
from cloud.models.interval_adapter import IntervalFeatures
from cloud.models.transformer import Transformer, TransformerConfig
from shared.bundle import Bundle
from shared.features import FEATURE_MODES
from shared.graphs import CaptionEncoder
from shared.sampling import SamplingSettings
from training.export.bundle import BundleModels, BundleSettings, write_bundle
from training.graphs import open_graph
from training.quantise import Precision
from training.text_encoder import GRAPH, TOKENIZER, write_encoder
from training.uncertainty import calibrate

__all__ = [
    "toy_calibration",
    "toy_codec",
    "toy_drafter",
    "toy_features",
    "toy_target",
    "toy_text_encoder",
    "toy_tokenizer",
    "write_toy_bundle",
]

FACTOR = 8
CAPTION_DIM = 16
PREFIX_ROWS = 12
DRAFTER_NOISE = 0.3

_PICTURES = 64  # that the calibration is computed from
_WORDS = "a an the one two three red green blue yellow apple cat dog car star tree house on of and in beside above sky"
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# Wide enough that logits spread over several units; the residual stream stays near unit scale.
_SCALES = {"head": 0.5, "embedding": 1.0, "absent_rows": 1.0, "caption_projection": 0.4, "radius": 0.4}
_SCALE = 0.35


def write_toy_bundle(
    folder: Path,
    vocabulary: int = 3,
    rows: int = 2,
    cols: int = 2,
    seed: int = 0,
    drafter_noise: float = DRAFTER_NOISE,
    precision: Precision | None = None,
    defaults: SamplingSettings | None = None,
    features: bool = True,
) -> Bundle:
    """Writes a bundle of tiny random models and opens it.

    Args:
        folder: where it will lie; replaced if it exists.
        vocabulary, rows, cols: visual tokens and grid.
        seed: of all random weights; the same seed gives the same models.
        drafter_noise: 0 gives the drafter the target's own weights, 1 weights of its own; the default gives a total
            variation of about 0.4.
        precision: of the drafter's graph; float32 when None.
        defaults: sampling settings in the manifest.
        features: whether it has a calibration and interval features, of every mode and far from zero.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _seeded(seed), TemporaryDirectory(dir=folder.parent) as temporary:
        target = toy_target(vocabulary, rows, cols)
        models_ = BundleModels(
            target=target,
            drafter=toy_drafter(target, drafter_noise),
            codec=toy_codec(vocabulary, max(rows, cols)),
            text_encoder=toy_text_encoder(Path(temporary)),
        )
        if features:
            extra = toy_features(models_.target, models_.drafter)
            models_ = replace(models_, features=extra, calibration=toy_calibration(models_))
        settings = BundleSettings("toy", defaults or SamplingSettings(), precision or Precision("fp32"))
        return write_bundle(folder, models_, settings)


def toy_features(target: Transformer, drafter: Drafter) -> IntervalFeatures:
    """Random interval features of every mode, whose vectors are about as long as an embedding."""
    dims = target.config.dim, drafter.config.transformer.dim
    features = IntervalFeatures(list(FEATURE_MODES[1:]), *dims, inner=8)
    _scatter(features)
    return features.eval()


@torch.no_grad()
def toy_calibration(models: BundleModels) -> dict[str, Any]:
    """A calibration of the drafter's scores on pictures that it draws of random captions."""
    tokenizer = Tokenizer.from_file(str(models.text_encoder / TOKENIZER))
    encoder = CaptionEncoder(open_graph(models.text_encoder / GRAPH), tokenizer, PREFIX_ROWS)
    captions = [torch.from_numpy(encoder.encode(prompt)) for prompt in _prompts()]
    return calibrate(models.drafter, captions, SamplingSettings(), precision="fp32")


def _prompts() -> Iterator[str]:
    """Prompts of two to five words."""
    words = _WORDS.split()
    for length in torch.randint(2, 6, (_PICTURES,)).tolist():
        yield " ".join(words[index] for index in torch.randint(len(words), (length,)).tolist())


def toy_target(vocabulary: int, rows: int, cols: int) -> Transformer:
    """A random target of about 10,000 parameters; draws its weights from torch's generator."""
    config = TransformerConfig(
        vocabulary,
        rows,
        cols,
        dim=16,
        layers=2,
        heads=2,
        ffn_dim=32,
        prefix_rows=PREFIX_ROWS,
        caption_dim=CAPTION_DIM,
        summary_dim=8,
    )
    target = Transformer(config)
    _scatter(target)
    return target.eval()


def toy_drafter(target: Transformer, noise: float) -> Drafter:
    """A drafter whose weights are the target's, turned towards random ones: 0 not at all, 1 wholly.

    Raises:
        ValueError: noise lies outside [0, 1].
    """
    if not 0.0 <= noise <= 1.0:
        raise ValueError(f"drafter_noise: a number from 0 to 1 is needed, not {noise}")
    drafter = Drafter(DrafterConfig(target.config))
    _scatter(drafter)
    kept = (1.0 - noise) / ((1.0 - noise) ** 2 + noise**2) ** 0.5  # keeps the variance of the weights
    drawn = noise / ((1.0 - noise) ** 2 + noise**2) ** 0.5
    own = target.state_dict()
    with torch.no_grad():
        for name, parameter in drafter.transformer.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(kept * own[name] + drawn * parameter)
    return drafter.eval()


def _scatter(model: nn.Module) -> None:
    """Draws every matrix anew, wide enough to make rows that differ."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            scale = next((value for key, value in _SCALES.items() if key in name), _SCALE)
            nn.init.normal_(parameter, std=scale)


def toy_codec(vocabulary: int, side: int) -> ImageCodec:
    """A random codec for a grid of at most side x side tokens of 8 x 8 pixels."""
    config = ImageCodecConfig(
        size=FACTOR * side,
        factor=FACTOR,
        codebook_size=vocabulary,
        encoder_width=16,
        decoder_width=16,
        encoder_blocks=1,
        decoder_blocks=1,
    )
    return ImageCodec(config).eval()


def toy_text_encoder(folder: Path, width: int = CAPTION_DIM) -> Path:
    """Writes a one-layer random BERT of `width` channels and its tokenizer into a folder; returns the folder."""
    tokenizer = toy_tokenizer()
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=width,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    model = BertModel(config, add_pooling_layer=False).eval()
    write_encoder(model, tokenizer, folder, Precision("fp32"), least_cosine=0.999)
    return folder


def toy_tokenizer() -> Tokenizer:
    """A WordPiece tokenizer of some words and all letters, with [CLS] and [SEP] around a prompt."""
    pieces = [*_SPECIAL, *_WORDS.split(), *string.printable, *(f"##{c}" for c in string.ascii_lowercase)]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    )
    return tokenizer


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seeds torch for a block, and puts its generator back after it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
