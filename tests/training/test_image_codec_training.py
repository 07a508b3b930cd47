"""The codec's training: it learns, keeps its tokens when told to, reports honestly, and names bad settings."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

import training.image_codec as stage
from cloud.models.image_codec import ImageCodec, ImageCodecConfig
from training.codec_report import copy_entropy, frequency_entropy, measure
from training.data.settings import DataSettings
from training.image_codec import CodecLoss, CodecLossSettings, CodecTrainingSettings, detail_weight, run_image_codec
from training.loop import LoopSettings
from training.perceptual import PerceptualLoss, load_network, pooled_features, ssim

TINY = ImageCodecConfig(
    size=32, codebook_size=16, code_dim=4, encoder_width=16, decoder_width=32, encoder_blocks=1, decoder_blocks=1
)
PALETTE = torch.tensor([[0.9, 0.9, 0.9], [-0.8, -0.7, -0.9], [0.8, -0.6, -0.6], [-0.7, 0.2, 0.8]])


class Quarters(Dataset[tuple[Tensor, str]]):
    """Four squares of a few colours: flat where a token lies, so that a small codebook can say them all."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, str]:
        generator = torch.Generator().manual_seed(index)
        colours = PALETTE[torch.randint(4, (2, 2), generator=generator)].permute(2, 0, 1)
        return colours.repeat_interleave(16, dim=1).repeat_interleave(16, dim=2), "four squares"


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CodecTrainingSettings:
    monkeypatch.setattr(stage, "open_images", lambda data, split: Quarters())
    loop = LoopSettings(
        folder=tmp_path, steps=120, batch_size=8, precision="fp32", warmup_steps=5, ema_decay=0.9, threads=1
    )
    return CodecTrainingSettings(
        data=DataSettings(size=32),
        loop=loop,
        codec=TINY,
        loss=CodecLossSettings(perceptual=0.0),
        learning_rate=4e-3,
        report_images=64,
        validation_images=8,
    )


def _batch() -> Tensor:
    return torch.stack([Quarters()[index][0] for index in range(8)])


def test_training_learns_and_leaves_a_codec_a_report_and_a_picture(settings: CodecTrainingSettings) -> None:
    torch.manual_seed(0)
    untrained = measure(ImageCodec(TINY).eval(), _batch())
    report = run_image_codec(settings)
    assert report is not None
    assert report.mse < 0.4 * untrained.mse
    final = settings.loop.folder / "final"
    codec = ImageCodec.load(final)
    assert measure(codec, torch.stack([Quarters()[index][0] for index in range(64)])).mse == pytest.approx(report.mse)
    assert (final / "report.json").is_file()
    assert (final / "reconstructions.png").is_file()


def test_decoder_only_training_keeps_every_token(settings: CodecTrainingSettings, tmp_path: Path) -> None:
    run_image_codec(settings)
    before = ImageCodec.load(tmp_path / "final")
    loop = replace(
        settings.loop, folder=tmp_path / "polished", init_from=tmp_path / "final/image_codec.safetensors", steps=10
    )
    run_image_codec(replace(settings, loop=loop, decoder_only=True))
    after = ImageCodec.load(tmp_path / "polished" / "final")
    ids = before.encode(_batch())
    assert torch.equal(after.encode(_batch()), ids)
    assert not torch.equal(after.decode(ids), before.decode(ids))


def test_the_perceptual_distance_is_zero_for_equals_and_grows_with_blur() -> None:
    loss = PerceptualLoss()
    sharp = torch.nn.functional.interpolate(_batch(), scale_factor=2)
    blurred = [torch.nn.functional.avg_pool2d(sharp, size, 1, size // 2) for size in (3, 7)]
    assert float(loss(sharp, sharp)) == pytest.approx(0.0, abs=1e-6)
    assert 0.001 < float(loss(blurred[0], sharp)) < float(loss(blurred[1], sharp))


def test_the_perceptual_loss_is_frozen_but_passes_gradients_to_the_pictures() -> None:
    loss = PerceptualLoss((0,)).train()
    images = torch.zeros(1, 3, 32, 32, requires_grad=True)
    loss(images, _batch()[:1]).backward()
    assert images.grad is not None
    assert float(images.grad.abs().sum()) > 0
    assert not any(parameter.requires_grad for parameter in loss.parameters())


def test_folded_features_equal_those_of_the_original_network() -> None:
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = load_network().extract_features(images).mean(dim=(2, 3))
    ours = pooled_features(images)
    assert ours.shape == (2, 1280)
    assert torch.allclose(ours, wanted, atol=1e-4)


def test_unknown_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="blocks must be numbers from 0 to 15"):
        PerceptualLoss((0, 16))


def test_similarity_is_one_for_equals_and_falls_with_noise() -> None:
    images = _batch()
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(ssim(images, images), torch.ones(8), atol=1e-5)
    assert float(ssim(images + 0.05 * noise, images).mean()) > float(ssim(images + 0.5 * noise, images).mean())


def test_details_weigh_more_than_the_background_and_the_mean_is_one() -> None:
    images = torch.zeros(1, 3, 32, 32)
    images[:, :, 15:17, 15:17] = 1.0
    weight = detail_weight(images, 2.0)
    assert weight.shape == (1, 1, 32, 32)
    assert float(weight.mean()) == pytest.approx(1.0)
    assert float(weight[0, 0, 15, 15]) > 2 * float(weight[0, 0, 0, 0])
    assert torch.equal(detail_weight(images, 0.0), torch.ones(1, 1, 32, 32))


def test_each_term_adds_its_weight_to_the_loss() -> None:
    images, commitment = _batch(), torch.tensor(0.5)
    reconstruction = images + 0.1
    names = ("l1", "mse", "gradient", "perceptual", "commitment", "detail")
    plain: dict[str, Any] = dict.fromkeys(names, 0.0)
    expected = {"l1": 0.1, "mse": 0.01, "gradient": 0.0, "commitment": 0.5}
    for name, value in expected.items():
        loss, terms = CodecLoss(CodecLossSettings(**{**plain, name: 2.0}))(images, reconstruction, commitment)
        assert float(loss) == pytest.approx(2.0 * value, abs=1e-5)
        assert float(terms[name]) == pytest.approx(value, abs=1e-5)


def test_token_entropies_match_hand_counts() -> None:
    assert frequency_entropy(torch.tensor([0, 0, 1, 1]), 8) == pytest.approx(math.log(2))
    assert frequency_entropy(torch.tensor([3, 3, 3]), 8) == pytest.approx(0.0)
    flat = torch.zeros(1, 2, 2, dtype=torch.int64)  # one new token, two copies of the left, one of the upper neighbour
    kinds = frequency_entropy(torch.tensor([2, 0, 1, 0]), 3)
    assert copy_entropy(flat, 8) == pytest.approx(kinds)
    fresh = torch.arange(4).view(1, 2, 2)
    assert copy_entropy(fresh, 8) == pytest.approx(math.log(4))


def test_the_report_counts_repeated_neighbours() -> None:
    torch.manual_seed(0)
    report = measure(ImageCodec(TINY).eval(), torch.zeros(3, 3, 32, 32))
    assert (report.images, report.token_entropy, report.perplexity) == (3, 0.0, 1.0)
    assert report.equal_left == report.equal_above == pytest.approx(0.75)
    assert report.equal_either == pytest.approx(15 / 16)
    assert report.codes_used == pytest.approx(1 / 16)


def test_the_shipped_settings_load() -> None:
    settings = CodecTrainingSettings.load(Path(__file__).resolve().parents[2] / "configs" / "image_codec.toml")
    assert settings.codec.rows == 16


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[loss]\nl1 = -1.0", r"\[loss\] l1 must not be negative"),
        ("[loss]\nsharp = 1.0", r"\[loss\] has no setting 'sharp'"),
        ("[codec]\nsize = 100", r"\[codec\] size must be a multiple"),
        ("[codec]\nsize = 64", r"\[training\] data.size 128 and codec.size 64 must be equal"),
        ("[training]\nlearning_rate = 0.0", r"\[training\] learning_rate must be above zero"),
        ("[training]\ndecoder_only = true", r"decoder_only needs loop.init_from"),
        ("[training]\nreport_images = 2.5", r"\[training\] report_images must be of type int, got 2.5"),
        ("[loss]\nmse = true", r"\[loss\] mse must be of type float, got True"),
        ("[loops]\nsteps = 3", "unknown table or setting 'loops'"),
    ],
)
def test_a_bad_file_names_table_and_setting(tmp_path: Path, text: str, message: str) -> None:
    loop = '[loop]\nfolder = "work/x"\nsteps = 2\nbatch_size = 2\n'
    path = tmp_path / "settings.toml"
    path.write_text(f"[data]\nsize = 128\n{loop}{text}\n")
    with pytest.raises(ValueError, match=message):
        CodecTrainingSettings.load(path)
