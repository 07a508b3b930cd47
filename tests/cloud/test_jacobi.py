"""The window decoder: exact where it says so, by enumeration; and the test sees a rule that is not."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch

from cloud.engine import Engine, Feed
from cloud.methods.jacobi import decode_window
from cloud.methods.sampler import sample
from cloud.models.transformer import Transformer, TransformerConfig
from cloud.relaxation import make_rule
from cloud.session import Request, Session
from protos import ciar_pb2 as pb
from shared.methods import find_method, find_rule
from shared.sampling import SamplingSettings, guide, warp
from shared.transcript import Provenance, Transcript
from shared.windows import AFTER, WindowSettings
from tests.cloud.conftest import CAPTION_DIM, PREFIX_ROWS, MakeModel
from tests.end_to_end.laws import Law, fit

ROWS, COLS, VOCABULARY = 2, 3, 4
SAMPLING = SamplingSettings(temperature=0.7, top_k=3, guidance=1.5)
SLOTS, PICTURES, LEVEL = 50, 1000, 1e-4


@pytest.fixture(scope="module")
def target() -> Transformer:
    """A decoder whose rows depend strongly on what came before."""
    shape = {"dim": 16, "layers": 2, "heads": 2, "ffn_dim": 32, "prefix_rows": PREFIX_ROWS, "caption_dim": CAPTION_DIM}
    model = Transformer(TransformerConfig(VOCABULARY, ROWS, COLS, **shape))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            scale = 0.5 if "head" in name else 1.0 if "embedding" in name else 0.4
            parameter.data = torch.randn(parameter.shape, generator=generator) * scale
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def caption() -> torch.Tensor:
    return torch.randn(3, CAPTION_DIM, generator=torch.Generator().manual_seed(100))


@pytest.fixture(scope="module")
def exact(target: Transformer, caption: torch.Tensor) -> Law:
    """The joint law of whole pictures."""
    tokens = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=ROWS * COLS)))
    padded = torch.zeros(len(tokens), PREFIX_ROWS, CAPTION_DIM)
    padded[:, : len(caption)] = caption
    lengths = torch.full((len(tokens),), len(caption))
    logits = [target(padded, some, tokens).logits for some in (lengths, lengths * 0)]
    rows = warp(guide(*logits, SAMPLING.guidance), SAMPLING).double()
    joint = rows.gather(-1, tokens.unsqueeze(-1)).sum((1, 2)).exp()
    return {tuple(picture): chance for picture, chance in zip(tokens.tolist(), joint.tolist(), strict=True)}


@pytest.fixture(scope="module")
def engine(target: Transformer) -> Engine:
    return Engine(target, SLOTS)


def begin(
    engine: Engine,
    caption: torch.Tensor,
    seed: int,
    rule: str = "exact",
    heard: list[pb.CloudMessage] | None = None,
    **options: Any,
) -> Session:
    """A session of `sjd` with a rule, or of `ar` (rule "-"); `heard` gets its messages."""
    method = find_method("ar" if rule == "-" else "sjd")
    found = None if rule == "-" else find_rule(method, rule)
    numbers = found.settings(options.pop("numbers", {})) if found else {}
    request = Request(
        "picture", caption.numpy(), Transcript(engine.config.grid, engine.config.vocabulary), method, found,
        SAMPLING, seed, rule_options=numbers, window=WindowSettings(**{"size": 3} | options),
    )  # fmt: skip
    judged = found is not None and rule != "gumbel"
    acceptance = make_rule(rule, numbers, lambda: torch.eye(VOCABULARY)) if judged else None
    return Session(engine, request, heard.append if heard is not None else _unheard, acceptance=acceptance)


def _unheard(message: pb.CloudMessage) -> None: ...


def run(sessions: list[Session]) -> int:
    """Drives sessions together, as the scheduler does; returns the passes it took."""
    work = [decode_window(s) if s.request.method.cloud_role == "window decoder" else sample(s) for s in sessions]
    needs: list[tuple[Any, Feed]] = [(one, next(one)) for one in work]
    engine, passes = sessions[0].engine, 0
    while needs:
        passes += 1
        outputs = engine.forward([need for _, need in needs])
        going = []
        for (one, _), rows in zip(needs, outputs, strict=True):
            try:
                going.append((one, one.send(rows)))
            except StopIteration:
                continue
        needs = going
    for session in sessions:
        session.close()
    return passes


def pictures(engine: Engine, caption: torch.Tensor, count: int, **options: Any) -> Counter[tuple[int, ...]]:
    drawn: Counter[tuple[int, ...]] = Counter()
    for first in range(0, count, SLOTS):
        sessions = [begin(engine, caption, seed, **options) for seed in range(first, min(first + SLOTS, count))]
        run(sessions)
        drawn.update(tuple(session.transcript.tokens) for session in sessions)
    return drawn


@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("init", ["uniform", "left", "mix"])
def test_exact_windows_give_the_targets_joint_law(
    engine: Engine, caption: torch.Tensor, exact: Law, after: str, init: str
) -> None:
    assert fit(pictures(engine, caption, PICTURES, after=after, init=init), exact) > LEVEL


def test_the_law_test_sees_the_bias_of_csd(engine: Engine, caption: torch.Tensor, exact: Law) -> None:
    numbers = {"lambda": 5.0, "delta": 0.9}
    assert fit(pictures(engine, caption, 600, rule="csd", numbers=numbers, init="uniform"), exact) < LEVEL


def test_the_law_test_sees_proposals_that_do_not_say_what_they_were_drawn_from(
    engine: Engine, caption: torch.Tensor, exact: Law, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of a neighbour, tested as if they were uniform draws."""
    from cloud.methods import jacobi

    right = jacobi._entering

    def lying(session: Session, window: Any) -> tuple[int, torch.Tensor]:
        token, law = right(session, window)
        return token, torch.full_like(law, 1.0 / VOCABULARY)

    monkeypatch.setattr(jacobi, "_entering", lying)
    assert fit(pictures(engine, caption, 600, after="stop", init="left"), exact) < LEVEL


@pytest.mark.parametrize("init", ["uniform", "left", "above", "mix"])
@pytest.mark.parametrize("size", [2, 4, 16])
def test_shared_noise_gives_the_picture_of_plain_sampling(
    engine: Engine, caption: torch.Tensor, init: str, size: int
) -> None:
    for seed in range(6):
        window, plain = begin(engine, caption, seed, "gumbel", init=init, size=size), begin(engine, caption, seed, "-")
        run([window, plain])
        assert window.transcript.tokens == plain.transcript.tokens


@pytest.mark.parametrize("numbers", [{"lambda": 0.0}, {"delta": 0.0}])
@pytest.mark.parametrize("after", AFTER)
def test_csd_that_relaxes_nothing_is_sjd_to_the_last_bit(
    engine: Engine, caption: torch.Tensor, numbers: dict[str, float], after: str
) -> None:
    for seed in range(10):
        relaxed = begin(engine, caption, seed, "csd", numbers=numbers, after=after, size=5)
        strict = begin(engine, caption, seed, "exact", after=after, size=5)
        run([relaxed, strict])
        assert relaxed.transcript.tokens == strict.transcript.tokens
        assert relaxed.transcript.count(Provenance.RELAXED) == 0


def test_messages_carry_every_token_once_with_its_marks(engine: Engine, caption: torch.Tensor) -> None:
    for seed in range(20):
        heard: list[pb.CloudMessage] = []
        session = begin(engine, caption, seed, "csd", heard, numbers={"lambda": 5.0, "delta": 0.9}, size=6)
        run([session])
        messages = [message.tokens for message in heard if message.HasField("tokens")]
        assert [token for message in messages for token in message.ids] == session.transcript.tokens
        assert b"".join(message.provenance for message in messages) == session.transcript.provenance_bytes()
        assert all(len(message.entropy) == len(message.ids) for message in messages)
        assert all(message.tv_cost >= 0 and message.HasField("tv_cost") for message in messages)
        starts = [message.start for message in messages]
        assert all(later // COLS > earlier // COLS for earlier, later in itertools.pairwise(starts))


def test_windows_need_fewer_passes_than_tokens(make_model: MakeModel, caption: torch.Tensor) -> None:
    engine = Engine(make_model(), slots=2)
    window, plain = begin(engine, caption, 0, "gumbel", size=12), begin(engine, caption, 0, "-")
    assert run([window]) < run([plain]) == 12


def test_rows_of_a_batch_advance_on_their_own(engine: Engine, caption: torch.Tensor) -> None:
    """A picture is the same alone and among others that take more passes."""
    alone = begin(engine, caption, 3, size=6)
    run([alone])
    among = [begin(engine, caption, seed, size=size) for seed, size in ((3, 6), (4, 2), (5, 3))]
    run(among)
    assert among[0].transcript.tokens == alone.transcript.tokens
