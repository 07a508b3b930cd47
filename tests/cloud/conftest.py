"""Small random models, an engine to run them, and a tiny bundle written by the real export code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cloud.engine import Engine
from cloud.models.transformer import Transformer, TransformerConfig
from cloud.session import Request
from shared.bundle import Bundle
from shared.methods import find_method, find_rule
from shared.sampling import SamplingSettings
from shared.transcript import Provenance, Transcript

PREFIX_ROWS, CAPTION_DIM, VOCABULARY = 4, 6, 7

MakeModel = Callable[..., Transformer]
MakeRequest = Callable[..., Request]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices of a few rows are faster on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def toy_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Five visual tokens on a 2x3 grid. Read only."""
    # The export code takes seconds to import: only the tests that need a bundle pay for it.
    from training.toy import write_toy_bundle

    return write_toy_bundle(tmp_path_factory.mktemp("toy") / "bundle", vocabulary=5, rows=2, cols=3, seed=2)


@pytest.fixture(scope="session")
def make_model() -> MakeModel:
    """Makes a decoder for a 3x4 grid whose every parameter is random, so that each part matters."""

    def make(seed: int = 0, **fields: Any) -> Transformer:
        shape = {"rows": 3, "cols": 4, "dim": 16, "layers": 2, "heads": 4, "ffn_dim": 24}
        shape |= {"prefix_rows": PREFIX_ROWS, "caption_dim": CAPTION_DIM}
        model = Transformer(TransformerConfig(VOCABULARY, **shape | fields))
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            # Norm weights stay around one, and logits spread over some units.
            parameter.data = (
                1 + 0.2 * drawn if name.endswith("norm.weight") else drawn * (0.5 if "head" in name else 0.3)
            )
        return model.eval().requires_grad_(False)

    return make


@pytest.fixture
def model(make_model: MakeModel) -> Transformer:
    return make_model()


@pytest.fixture
def engine(model: Transformer) -> Engine:
    """An engine with three slots."""
    return Engine(model, slots=3)


@pytest.fixture
def features() -> Tensor:
    """A caption of three rows."""
    return torch.randn(3, CAPTION_DIM, generator=torch.Generator().manual_seed(100))


@pytest.fixture
def make_request(model: Transformer, features: Tensor) -> MakeRequest:
    """Makes what a device may ask of an engine that runs `model`."""

    def make(method: str = "sd", rule: str = "", tokens: Sequence[int] = (), **fields: Any) -> Request:
        found = find_method(method)
        transcript = Transcript(model.config.grid, VOCABULARY)
        transcript.extend(tokens, Provenance.SAMPLED)
        defaults: dict[str, Any] = {"sampling": SamplingSettings(temperature=0.8, top_k=5, guidance=2.0), "seed": 11}
        return Request("picture", features.numpy(), transcript, found, find_rule(found, rule), **defaults | fields)

    return make
