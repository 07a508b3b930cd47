"""Data settings come from TOML, and what is wrong in them is named."""

from pathlib import Path

import pytest

from training.data.settings import ConceptSettings, DataSettings, SceneSettings

DEFAULT = Path(__file__).parents[2] / "configs" / "data.toml"


def load(tmp_path, text):
    path = tmp_path / "train.toml"
    path.write_text(text, encoding="utf-8")
    return DataSettings.load(path)


def test_the_shipped_config_loads_and_asks_for_permissive_styles_only():
    settings = DataSettings.load(DEFAULT)
    assert settings.size == 128
    assert not {"simple flat icon", "bright icon"} & set(settings.styles)


def test_a_config_may_point_to_the_file_that_holds_its_data_table(tmp_path):
    (tmp_path / "data.toml").write_text("[data]\nsize = 64\n", encoding="utf-8")
    assert load(tmp_path, 'data = "data.toml"\n').size == 64


def test_nested_tables_and_paths_arrive_typed(tmp_path):
    settings = load(
        tmp_path,
        '[data]\nfolder = "x"\n[data.concepts]\ngroups = ["food-drink"]\n'
        "[data.scenes]\nsingle = 1\npair = 0\ncount = 0\n",
    )
    assert settings.folder == Path("x")
    assert settings.concepts.groups == ("food-drink",)
    assert settings.scenes.single == 1


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[data]\nsice = 64\n", "data has no setting 'sice'"),
        ('[data]\nsize = "64"\n', "data.size must be a whole number"),
        ("[data]\nsize = true\n", "data.size must be a whole number"),
        ("[data]\nsize = 8\n", "data.size"),
        ("[data]\nlength = 0\n", "data.length"),
        ('[data]\nsource = "web"\n', "data.source"),
        ('[data]\nsource = "folder"\n', "data.pictures"),
        ('[data]\nstyles = ["oil painting"]\n', "data.styles"),
        ("[data]\nstyles = []\n", "data.styles"),
        ('[data]\nstyles = "cartoon"\n', "data.styles must be a list of strings"),
        ("[data]\nscenes = 3\n", "data.scenes must be a table"),
        ("[data.scenes]\nsingle = 0.9\n", "single, pair, count must sum to 1"),
        ("[data.scenes]\nfloor = 0.9\n", "solid, gradient, floor must sum to 1"),
        ("[data.scenes]\nsmallest = 0.95\n", "smallest"),
        ("[data.scenes]\nomit = 2.0\n", "data.scenes.omit"),
        ("[data.scenes]\ncolour_jitter = 40\n", "colour_jitter"),
        ("[data.scenes]\ncontrast = 200.0\n", "contrast"),
        ("[data.scenes]\nstep = 0\n", "data.scenes.step must lie in 1..32"),
        ("[data.concepts]\ngroups = []\nsubgroups = []\n", "no concept is chosen"),
        ("size = 3\n", r"needs a \[data\] table"),
        ("[data\n", "train.toml"),
    ],
)
def test_a_bad_setting_is_named(tmp_path, text, named):
    with pytest.raises(ValueError, match=named):
        load(tmp_path, text)


def test_a_pointer_to_a_pointer_is_refused_rather_than_followed_forever(tmp_path):
    with pytest.raises(ValueError, match=r"needs a \[data\] table"):
        load(tmp_path, 'data = "train.toml"\n')


def test_settings_cannot_be_changed_after_they_were_checked():
    for settings, name in ((DataSettings(), "size"), (SceneSettings(), "single"), (ConceptSettings(), "groups")):
        with pytest.raises(AttributeError):
            setattr(settings, name, 3)
