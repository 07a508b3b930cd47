"""Prompts ask for what no picture shows, and never for what a split holds out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from training.cli import STAGES
from training.data.backgrounds import COLOURS
from training.data.concepts import Concept
from training.data.prompts import PromptSettings, PromptWriter, read_prompts, run_prompts
from training.data.settings import ConceptSettings, DataSettings, SceneSettings
from training.data.splits import background_held_out
from training.data.styles import LABELS, STYLES

STYLE_PHRASES = {style.phrase for style in STYLES.values()}


def concept(name: str, group: str, *synonyms: str) -> Concept:
    return Concept(f"code-{name}", name, name, group, "any", synonyms, ())


CONCEPTS = [
    *(concept(name, "animals-nature") for name in ("fox", "crab", "heron", "tulip")),
    concept("train", "travel-places", "railway"),
    *(concept(name, "objects") for name in ("kettle", "lamp", "railway", "crab")),
    concept("grin", "smileys-emotion"),
]
DATA = DataSettings(
    styles=("3d render", "cartoon"), concepts=ConceptSettings(("animals-nature", "travel-places"), subgroups=())
)
SETTINGS = PromptSettings(DATA, train=400, val=40)


def written(count: int = 400, settings: PromptSettings = SETTINGS) -> list[str]:
    writer = PromptWriter(CONCEPTS, settings)
    return [writer.write("train", index) for index in range(count)]


def test_new_things_come_in_the_styles_of_the_data_and_known_ones_in_others() -> None:
    prompts = written()
    news = [prompt for prompt in prompts if "kettle" in prompt or "lamp" in prompt]
    for prompt in prompts:
        phrases = {phrase for phrase in STYLE_PHRASES if f"{phrase} of " in prompt}
        if prompt in news:
            assert phrases <= {"3d render", "cartoon"}
        else:  # also "old cartoon", which ends as "cartoon" does
            assert phrases - {"3d render", "cartoon"}
    assert abs(len(news) / len(prompts) - SETTINGS.new_things) < 0.08
    # Known by another name, and of a group that is not asked for.
    assert not any("railway" in prompt or "grin" in prompt for prompt in prompts)


def test_only_known_names_are_asked_for_without_new_things_and_only_new_ones_with_nothing_else() -> None:
    known = written(100, replace(SETTINGS, new_things=0.0))
    new = written(100, replace(SETTINGS, new_things=1.0))
    assert all(any(name in prompt for name in ("fox", "crab", "heron", "tulip", "train")) for prompt in known)
    assert all("kettle" in prompt or "lamp" in prompt for prompt in new)


def test_no_held_out_colour_is_behind_a_thing() -> None:
    plain = DataSettings(
        styles=DATA.styles,
        concepts=DATA.concepts,
        scenes=SceneSettings(single=1.0, pair=0.0, count=0.0, solid=1.0, gradient=0.0, floor=0.0, omit=0.0),
    )
    prompts = written(2000, replace(SETTINGS, data=plain))
    held_out = {(c.name, name) for c in CONCEPTS for name in COLOURS if background_held_out(c.code, name)}
    asked = {(c.name, n) for c in CONCEPTS for n in COLOURS for p in prompts if f" {c.name} on a {n} " in p}
    assert held_out
    assert len(asked) > 40
    assert not asked & held_out


def test_a_prompt_depends_on_seed_split_and_index_alone() -> None:
    writer = PromptWriter(CONCEPTS, SETTINGS)
    assert writer.write("train", 7) == written(8)[7]
    assert written(20) != [writer.write("val", index) for index in range(20)]
    assert written(20) != written(20, replace(SETTINGS, seed=1))


def _save_labels(folder: Path) -> None:
    package = folder / "packages" / LABELS.slug
    (package / "en").mkdir(parents=True)
    (package / "meta").mkdir()
    groups = sorted({item.group for item in CONCEPTS})
    entries = [
        {"hexcode": f"{number:X}", "label": item.name, "group": groups.index(item.group), "subgroup": 0}
        for number, item in enumerate(CONCEPTS)
    ]
    names = {"groups": {str(n): name for n, name in enumerate(groups)}, "subgroups": {"0": "any"}}
    (package / "en" / "data.json").write_text(json.dumps(entries), encoding="utf-8")
    (package / "meta" / "groups.json").write_text(json.dumps(names), encoding="utf-8")


def test_the_stage_writes_both_files_and_repeats_no_validation_prompt(tmp_path: Path) -> None:
    _save_labels(tmp_path / "data")
    run_prompts(replace(SETTINGS, data=replace(DATA, folder=tmp_path / "data"), folder=tmp_path / "prompts"))
    train, val = (read_prompts(tmp_path / "prompts" / f"{split}.txt") for split in ("train", "val"))
    assert len(val) == 40
    assert len(train) > 300
    assert not set(train) & set(val)


def test_a_file_without_prompts_or_of_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_bytes(b"\n  \n")
    with pytest.raises(ValueError, match=r"train\.txt holds no prompt"):
        read_prompts(tmp_path / "train.txt")
    (tmp_path / "train.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"train\.txt is not UTF-8"):
        read_prompts(tmp_path / "train.txt")
    (tmp_path / "train.txt").write_text("a fox\n\n  a crab  \n")
    assert read_prompts(tmp_path / "train.txt") == ["a fox", "a crab"]


def test_settings_that_leave_nothing_to_ask_for_say_so() -> None:
    with pytest.raises(ValueError, match="set new_things to 1"):
        PromptWriter(CONCEPTS, replace(SETTINGS, data=replace(DATA, styles=tuple(STYLES))))
    with pytest.raises(ValueError, match="set new_things to 0"):
        PromptWriter(CONCEPTS, replace(SETTINGS, groups=("animals-nature",)))
    with pytest.raises(ValueError, match="new_things"):
        replace(SETTINGS, new_things=1.5)
    with pytest.raises(ValueError, match=r'data\.source must be "scenes"'):
        PromptSettings(DataSettings(source="folder", pictures=Path("pictures")))


def test_the_stage_opens_with_its_default_settings() -> None:
    settings, run = STAGES["prompts"].open()
    assert callable(run)
    loaded = settings.load(Path("configs/prompts.toml"))
    assert loaded.data == DataSettings.load(Path("configs/data.toml"))
