"""The image codec: shapes, determinism, locality, the codebook's upkeep, the same answers after export and reload."""

import json
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from cloud.models.image_codec import Codebook, ImageCodec, ImageCodecConfig

TINY = ImageCodecConfig(
    size=32, codebook_size=16, code_dim=4, encoder_width=16, decoder_width=32, encoder_blocks=1, decoder_blocks=1
)


@pytest.fixture
def codec() -> ImageCodec:
    torch.manual_seed(0)
    model = ImageCodec(TINY)
    for parameter in model.parameters():  # residual branches start at zero: fill them, or they would prove nothing
        nn.init.normal_(parameter, std=0.1)
    return model.eval()


def pictures(count: int = 2, height: int = 32, width: int = 32) -> Tensor:
    return torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(1)) * 2 - 1


@pytest.mark.parametrize(("height", "width"), [(32, 32), (64, 64), (16, 48)])
def test_any_multiple_of_the_factor_encodes_and_decodes(codec: ImageCodec, height: int, width: int) -> None:
    ids = codec.encode(pictures(2, height, width))
    assert ids.shape == (2, height // 8, width // 8)
    assert ids.dtype == torch.int64
    assert 0 <= int(ids.min()) <= int(ids.max()) < TINY.codebook_size
    decoded = codec.decode(ids)
    assert decoded.shape == (2, 3, height, width)
    assert float(decoded.detach().abs().max()) <= 1.0


def test_a_picture_encodes_alike_alone_and_in_a_batch(codec: ImageCodec) -> None:
    batch = pictures(4)
    together, decoded = codec.encode(batch), codec.decode(codec.encode(batch))
    for index in range(4):
        assert torch.equal(codec.encode(batch[index : index + 1])[0], together[index])
    assert torch.equal(codec.encode(batch), together)
    assert torch.equal(codec.decode(together), decoded)


def test_a_flat_picture_is_one_code_up_to_its_edges(codec: ImageCodec) -> None:
    flat = torch.tensor([0.3, -0.7, 0.9])[None, :, None, None].expand(1, 3, 64, 64)
    assert codec.encode(flat).unique().numel() == 1


def test_a_token_does_not_see_what_lies_far_away(codec: ImageCodec) -> None:
    one, other = torch.full((1, 3, 64, 64), 0.5), torch.full((1, 3, 64, 64), 0.5)
    other[:, :, 48:, 48:] = pictures(1, 16, 16)
    before, after = codec.encoder(one), codec.encoder(other)
    assert torch.allclose(before[:, :, :3, :3], after[:, :, :3, :3], atol=1e-6)
    assert not torch.allclose(before[:, :, 6:, 6:], after[:, :, 6:, 6:], atol=1e-3)


def test_without_reach_a_token_is_its_own_pixels_alone() -> None:
    torch.manual_seed(0)
    codec = ImageCodec(replace(TINY, encoder_reach=0)).eval()
    for parameter in codec.parameters():
        nn.init.normal_(parameter, std=0.1)
    images, changed = pictures(1), pictures(1)
    changed[:, :, 8:16, 8:16] = -changed[:, :, 8:16, 8:16]
    before, after = codec.encoder(images), codec.encoder(changed)
    same = torch.ones(4, 4, dtype=torch.bool)
    same[1, 1] = False
    assert torch.equal(before[..., same], after[..., same])
    assert not torch.allclose(before[..., 1, 1], after[..., 1, 1], atol=1e-3)


def test_smooth_tokens_repeat_neighbours_more_and_lose_no_more_than_the_slack(codec: ImageCodec) -> None:
    images = pictures(4, 64, 64)
    plain, smooth = codec.encode(images), codec.encode_smooth(images, 0.1)
    assert torch.equal(codec.encode_smooth(images, 0.0), plain)
    closeness = torch.einsum("bdrc,kd->brck", codec.encoder(images), codec.codebook.codes)
    lost = closeness.gather(3, plain[..., None]) - closeness.gather(3, smooth[..., None])
    assert float(lost.detach().max()) <= 0.1 + 1e-6
    repeats = [int((ids[:, :, 1:] == ids[:, :, :-1]).sum()) for ids in (plain, smooth)]
    assert repeats[1] > repeats[0]
    with pytest.raises(ValueError, match="slack"):
        codec.encode_smooth(images, -0.1)


@pytest.mark.parametrize("shape", [(1, 3, 32, 30), (1, 1, 32, 32), (3, 32, 32)])
def test_pictures_of_another_shape_are_refused(codec: ImageCodec, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"images must be \(B, 3, H, W\)"):
        codec.encode(torch.zeros(shape))


def test_gradient_passes_straight_through_the_choice_of_code(codec: ImageCodec) -> None:
    images = pictures()
    reconstruction, _, _ = codec(images)
    (reconstruction * torch.linspace(0, 1, reconstruction.numel()).view_as(reconstruction)).sum().backward()
    received = {name: parameter.grad for name, parameter in codec.encoder.named_parameters()}
    assert all(gradient is not None and float(gradient.abs().sum()) > 0 for gradient in received.values())


def test_straight_through_gradient_equals_that_of_the_codes(codec: ImageCodec) -> None:
    vectors = codec.encoder(pictures()).detach().requires_grad_()
    codes = codec.codebook.lookup(codec.codebook.nearest(vectors)).detach().requires_grad_()
    codec.decoder(vectors + (codes - vectors).detach()).sum().backward()
    codec.decoder(codes).sum().backward()
    assert vectors.grad is not None
    assert codes.grad is not None
    assert torch.allclose(vectors.grad, codes.grad, atol=1e-5)


def test_forward_reconstructs_from_the_codes_alone(codec: ImageCodec) -> None:
    images = pictures()
    reconstruction, ids, commitment = codec(images)
    assert torch.equal(ids, codec.encode(images))
    assert torch.allclose(reconstruction.clamp(-1, 1), codec.decode(ids), atol=1e-5)
    assert float(commitment.detach()) > 0


def test_the_nearest_code_is_the_one_of_largest_cosine(codec: ImageCodec) -> None:
    vectors = codec.encoder(pictures()).detach()
    ids = codec.codebook.nearest(vectors)
    distances = (vectors[:, None] - codec.codebook.codes[None, :, :, None, None]).square().sum(dim=2)
    assert torch.equal(ids, distances.argmin(dim=1))


def test_the_first_update_fills_a_dead_codebook_from_the_data() -> None:
    torch.manual_seed(0)
    book = Codebook(TINY)
    vectors = nn.functional.normalize(torch.randn(200, 4), dim=1)
    book.update(vectors, torch.zeros(200, dtype=torch.int64))
    nearest = (book.codes[1:] @ vectors.t()).max(dim=1).values
    assert torch.allclose(nearest, torch.ones(len(nearest)), atol=1e-5)


def test_a_code_nobody_chooses_is_revived_and_a_chosen_one_is_not() -> None:
    torch.manual_seed(0)
    book = Codebook(TINY)
    book.usage.fill_(5.0)
    book.sums.copy_(book.codes * 5.0)
    book.usage[3] = 0.0
    before = book.codes.clone()
    ids = torch.arange(16)[torch.arange(16) != 3].repeat(10)
    book.update(before[ids], ids)
    assert not torch.allclose(book.codes[3], before[3], atol=1e-3)
    kept = torch.arange(16) != 3
    assert torch.allclose(book.codes[kept], before[kept], atol=1e-4)
    assert float(book.usage[3]) == 1.0


def test_revival_prefers_what_the_codes_miss() -> None:
    torch.manual_seed(0)
    book = Codebook(TINY)
    book.usage.fill_(5.0)
    book.codes.copy_(torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(16, 4))
    book.sums.copy_(book.codes * 5.0)
    book.usage[1:] = 0.0
    rare = torch.tensor([0.0, 1.0, 0.0, 0.0])
    vectors = torch.cat([book.codes[:1].expand(990, 4), rare.expand(10, 4)])
    book.update(vectors, torch.zeros(1000, dtype=torch.int64))
    revived = book.codes[1:]
    assert int((revived @ rare > 0.5).sum()) >= 8, "a uniform draw would return the background 99 times in 100"


def test_codes_settle_on_the_mean_direction_of_the_vectors_that_choose_them() -> None:
    torch.manual_seed(0)
    centres = torch.eye(4)
    vectors = nn.functional.normalize(centres.repeat(100, 1) + 0.05 * torch.randn(400, 4), dim=1)
    book = Codebook(replace(TINY, codebook_size=4, usage_decay=0.8))
    book.codes.copy_(nn.functional.normalize(centres + 0.4 * torch.randn(4, 4), dim=1))
    book.usage.fill_(100.0)
    book.sums.copy_(book.codes * 100.0)
    for _ in range(60):
        ids = book.nearest(vectors.t()[None, :, None, :])[0, 0]
        book.update(vectors, ids)
    assert ids.tolist() == list(range(4)) * 100
    means = nn.functional.normalize(vectors.view(100, 4, 4).sum(dim=0), dim=1)
    assert torch.allclose(book.codes, means, atol=1e-3)
    assert torch.allclose(book.codes.norm(dim=1), torch.ones(4), atol=1e-5)


def test_frozen_tokens_train_the_decoder_only(codec: ImageCodec) -> None:
    codec.freeze_tokens()
    codec.train()
    before = codec.codebook.codes.clone()
    codec(pictures())[0].sum().backward()
    assert torch.equal(before, codec.codebook.codes)
    assert all(parameter.grad is None for parameter in codec.encoder.parameters())
    assert all(parameter.grad is not None for parameter in codec.decoder.parameters())


def test_evaluation_leaves_the_codebook_alone(codec: ImageCodec) -> None:
    before = {name: value.clone() for name, value in codec.codebook.state_dict().items()}
    codec(pictures())
    assert all(torch.equal(value, before[name]) for name, value in codec.codebook.state_dict().items())


def test_a_saved_codec_loads_with_the_same_answers(codec: ImageCodec, tmp_path: Path) -> None:
    codec.save(tmp_path)
    loaded = ImageCodec.load(tmp_path)
    assert loaded.config == TINY
    assert torch.equal(loaded.encode(pictures()), codec.encode(pictures()))
    assert torch.equal(loaded.decode(codec.encode(pictures())), codec.decode(codec.encode(pictures())))


def test_loading_says_what_is_missing_or_does_not_fit(codec: ImageCodec, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"image_codec\.json is missing"):
        ImageCodec.load(tmp_path)
    codec.save(tmp_path)
    config = json.loads((tmp_path / "image_codec.json").read_text())
    (tmp_path / "image_codec.json").write_text(json.dumps({**config, "codebook_size": 32}))
    with pytest.raises(ValueError, match="does not match this code"):
        ImageCodec.load(tmp_path)
    (tmp_path / "image_codec.json").write_text(json.dumps({**config, "colour": "red"}))
    with pytest.raises(ValueError, match="does not match this code"):
        ImageCodec.load(tmp_path)


class _Half(nn.Module):
    """One direction of a codec, as an exporter sees it."""

    def __init__(self, codec: ImageCodec, name: str) -> None:
        super().__init__()
        self.codec, self.name = codec, name

    def forward(self, value: Tensor) -> Tensor:
        answer: Tensor = getattr(self.codec, self.name)(value)
        return answer


def _exported(half: nn.Module, example: Tensor, path: Path) -> onnxruntime.InferenceSession:
    axes = {axis: f"axis{axis}" for axis in range(example.ndim) if axis != 1 or example.ndim == 3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch announces another exporter
        torch.onnx.export(
            half, (example,), path, input_names=["value"], dynamo=False, opset_version=17, dynamic_axes={"value": axes}
        )
    return onnxruntime.InferenceSession(path)


def test_the_exported_encoder_gives_the_same_ids_at_any_batch_and_size(codec: ImageCodec, tmp_path: Path) -> None:
    session = _exported(_Half(codec, "encode"), pictures(2), tmp_path / "encoder.onnx")
    for images in (pictures(1), pictures(5), pictures(2, 64, 16)):
        ids = session.run(None, {"value": images.numpy()})[0]
        assert np.array_equal(ids, codec.encode(images).numpy())


def test_the_exported_decoder_gives_the_same_picture_at_any_batch_and_size(codec: ImageCodec, tmp_path: Path) -> None:
    example = torch.zeros(2, 4, 4, dtype=torch.int64)
    session = _exported(_Half(codec, "decode"), example, tmp_path / "decoder.onnx")
    for shape in ((1, 4, 4), (3, 2, 8)):
        ids = torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(2))
        images = session.run(None, {"value": ids.numpy()})[0]
        assert np.allclose(images, codec.decode(ids).detach().numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("factor", 4),
        ("factor", 12),
        ("size", 30),
        ("codebook_size", 0),
        ("encoder_width", 12),
        ("decoder_width", 20),
        ("usage_decay", 1.0),
        ("dead_below", -1.0),
        ("encoder_blocks", 0),
        ("encoder_reach", 2),
    ],
)
def test_a_bad_config_names_the_field(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        ImageCodecConfig(**{field: value})  # type: ignore[arg-type]


def test_the_default_codec_stays_small_enough_for_a_phone() -> None:
    config = ImageCodecConfig()
    assert config.rows == 16
    assert sum(parameter.numel() for parameter in ImageCodec(config).parameters()) < 12_000_000
