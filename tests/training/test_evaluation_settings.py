"""Settings of the evaluation say what is wrong with them, and lists of prompts hold what they promise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shared.errors import SettingsError
from shared.sampling import SamplingSettings
from tests.training.evaluation_sprites import sprite_set
from training.data.errors import DataError
from training.data.settings import DataSettings
from training.data.splits import assign_units, background_held_out
from training.evaluation import EvaluationSettings
from training.evaluation.prompts import folder_prompts, scene_prompts
from training.evaluation.settings import SamplingOverrides, SweepSettings, Way

DATA = "[data]\nsize = 64\n"
SPRITES = sprite_set()


def load(folder: Path, text: str) -> EvaluationSettings:
    path = folder / "evaluate.toml"
    path.write_text(DATA + text, encoding="utf-8")
    return EvaluationSettings.load(path)


def test_the_shipped_settings_load_and_evaluate_rather_than_sweep():
    settings = EvaluationSettings.load(Path("configs/evaluate.toml"))
    assert settings.split == "test"
    assert settings.bundle == Path("bundles/default")
    assert not settings.sweeps


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[evaluation]\ncount = 1", "count must be at least 2"),
        ("[evaluation]\nconcurrency = 0", "concurrency must be at least 1"),
        ('[evaluation]\nsplit = "train"', "split must be"),
        ('[evaluation]\ndevice = "tpu"', "device must be"),
        ("[evaluation]\nmethods = []", "methods must name"),
        ('[evaluation]\nmethods = ["guess"]', "'guess' is unknown"),
        ('[evaluation]\nmethods = ["sd-guess"]', "method sd takes"),
        ('[evaluation]\nextra = ["triples"]', "extra must be out of pair"),
        ('[evaluation]\ncontact_sheet = "docs/samples.png"', "contact_sheet must hold {method}"),
        ("[evaluation]\ncuont = 3", "has no setting 'cuont'"),
        ("[sampling]\ntemperature = 0.0", "temperature: "),
        ("[recogniser]\nridge = 0.0", "ridge must be above 0"),
        ("[sweep]\nguidance = [0.5]", "guidance: "),
        ("[sweep]\nguidance = [2.0]", 'split must be "val" for a sweep'),
        ('[evaluation]\nsplit = "val"\n[sweep]\nmethod = "ar-mrs"\nguidance = [2.0]', "method ar judges nothing"),
    ],
)
def test_what_cannot_be_is_named(tmp_path: Path, text: str, words: str):
    with pytest.raises(ValueError) as caught:
        load(tmp_path, text)
    assert words in str(caught.value)


def test_extra_lists_are_refused_for_a_picture_folder():
    with pytest.raises(ValueError, match="extra must be empty"):
        EvaluationSettings(DataSettings(source="folder", pictures=Path("mine")), extra=("pair",))


def test_overrides_replace_what_they_name_only():
    defaults = SamplingSettings(temperature=0.9, top_k=50, top_p=0.8, guidance=3.0)
    assert SamplingOverrides().over(defaults) == defaults
    assert SamplingOverrides(top_k=0, guidance=1.5).over(defaults) == SamplingSettings(0.9, 0, 0.8, 1.5)


def test_a_sweep_is_every_combination_over_the_other_overrides():
    sweep = SweepSettings(guidance=(1.0, 2.0), top_k=(0, 100))
    combinations = list(sweep.combinations(SamplingOverrides(temperature=0.7, guidance=9.0)))
    assert {(item.top_k, item.guidance) for item in combinations} == {(0, 1.0), (0, 2.0), (100, 1.0), (100, 2.0)}
    assert {item.temperature for item in combinations} == {0.7}
    assert list(SweepSettings().combinations(SamplingOverrides())) == []


def test_ways_carry_the_rule_in_their_name():
    names = {asked: Way.named(asked, SamplingSettings()).name for asked in ("ar", "device", "sd", "sd-block")}
    assert names == {"ar": "ar", "device": "device", "sd": "sd-gumbel", "sd-block": "sd-block"}


def test_ways_hand_their_options_to_the_device():
    way = Way.named("ciar:cloud_budget=0.2,score=entropy,batch=4,in_flight=3", SamplingSettings())
    asked = way.generate_settings(5)
    assert (asked.selection.cloud_budget, asked.selection.score, asked.selection.batch) == (0.2, "entropy", 4)
    assert (asked.in_flight, asked.seed) == (3, 5)
    window = Way.named("csd:size=64,delta=0.5", SamplingSettings()).generate_settings(0)
    assert (window.window.size, window.rule_options["delta"], window.in_flight) == (64, 0.5, 0)
    for wrong in ("ar:in_flight=2", "csd:in_flight=2", "sd:sise=2", "ciar:in_flight=two"):
        with pytest.raises(SettingsError):
            Way.named(wrong, SamplingSettings())


# -- prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["val", "test"])
def test_prompts_and_reference_are_other_scenes_of_the_same_split(split: str):
    units = assign_units({(row.concept.code, row.family) for row in SPRITES.table})
    prompts = scene_prompts(SPRITES, DataSettings(size=32), 30, seed=0, split=split)
    assert prompts.name == f"{split}-single"
    assert prompts.single
    assert len(prompts.captions) == len(prompts.pictures) == len(prompts.reference) == 30
    assert {picture.tobytes() for picture in prompts.pictures}.isdisjoint(p.tobytes() for p in prompts.reference)
    assert all(units[item.code, item.family] == split for claims in prompts.claims or () for item in claims.objects)
    again = scene_prompts(SPRITES, DataSettings(size=32), 10, seed=0, split=split)
    assert list(again.captions) == list(prompts.captions[:10])


@pytest.mark.parametrize(("extra", "name", "single"), [("pair", "val-pair", False), ("count", "val-count", False)])
def test_lists_of_more_objects_have_no_single_object_to_name(extra: str, name: str, single: bool):
    prompts = scene_prompts(SPRITES, DataSettings(size=32), 10, seed=0, split="val", extra=extra)
    assert (prompts.name, prompts.single) == (name, single)


def test_the_composition_list_asks_for_colours_that_train_never_showed():
    prompts = scene_prompts(SPRITES, DataSettings(size=32), 30, seed=0, extra="composition")
    assert prompts.name == "composition"
    for claims in prompts.claims or ():
        assert all(background_held_out(claims.objects[0].code, colour) for colour in claims.background.colours)


def picture_folder(folder: Path, count: int) -> DataSettings:
    lines = []
    (folder / "test").mkdir(parents=True)
    for number in range(count):
        Image.fromarray(np.full((16, 16, 3), 10 * number, np.uint8)).save(folder / "test" / f"{number}.png")
        lines.append(f'{{"file_name": "{number}.png", "text": "picture {number}"}}\n')
    (folder / "test" / "metadata.jsonl").write_text("".join(lines), encoding="utf-8")
    return DataSettings(source="folder", pictures=folder, size=16)


def test_own_pictures_are_halved_into_prompts_and_reference(tmp_path: Path):
    prompts = folder_prompts(picture_folder(tmp_path, 9), count=500)
    assert list(prompts.captions) == [f"picture {number}" for number in range(4)]
    assert [int(picture[0, 0, 0]) for picture in prompts.reference] == [40, 50, 60, 70]
    assert prompts.claims is None
    assert not prompts.single


def test_too_few_own_pictures_are_refused(tmp_path: Path):
    with pytest.raises(DataError, match="at least 4 are needed"):
        folder_prompts(picture_folder(tmp_path, 3), count=500)
