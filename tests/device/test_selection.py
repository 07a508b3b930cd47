"""Settings of a device that keeps tokens: each bad value is named, and the budget counts the prefix."""

from __future__ import annotations

import math
from typing import Any

import pytest

from device.selection import MODES, REPAIRS, SelectionSettings
from shared.errors import SettingsError
from shared.features import FEATURE_MODES
from shared.grid import Grid
from shared.intervals import SCORES
from shared.methods import METHODS, RULES
from shared.thresholds import THRESHOLDS


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"score": "vibes"}, "score: one of interval, width, entropy, random is needed, not 'vibes'"),
        ({"score": ""}, "score: "),
        ({"threshold_mode": "median"}, "threshold_mode: one of quantile, average, maxnorm, absolute .* not 'median'"),
        ({"mode": "offline"}, "mode: one of sync, batched, pipelined is needed, not 'offline'"),
        ({"repair": "pray"}, "repair: one of truncate, local is needed, not 'pray'"),
        ({"features": "code32"}, "features: one of none, scalars, code64, full is needed, not 'code32'"),
        ({"cloud_budget": -0.1}, r"cloud_budget: a share from 0 to 1 is needed, not -0\.1"),
        ({"cloud_budget": 1.1}, "cloud_budget: "),
        ({"cloud_budget": math.nan}, "cloud_budget: .* not nan"),
        ({"prefix_rate": 1.5}, r"prefix_rate: a share from 0 to 1 is needed, not 1\.5"),
        ({"prefix_rate": math.nan}, "prefix_rate: .* not nan"),
        ({"audit": -1.0}, r"audit: a share from 0 to 1 is needed, not -1\.0"),
        ({"audit": math.inf}, "audit: .* not inf"),
        ({"batch": -1}, r"batch: 1 to 64 is needed \(0 lets a controller choose\), not -1"),
        ({"batch": 65}, "batch: .* not 65"),
        ({"draft_rows": 0}, "draft_rows: 1 to 64 is needed, not 0"),
        ({"draft_rows": 65}, "draft_rows: .* not 65"),
        ({"threshold_mode": "absolute", "threshold": -1.0}, r"threshold: a number of at least 0 is needed, not -1\.0"),
        ({"threshold_mode": "maxnorm", "threshold": math.nan}, "threshold: a number of at least 0 is needed, not nan"),
        ({"threshold_mode": "absolute"}, "threshold: mode absolute needs a level"),
        ({"threshold": 0.3}, "threshold: mode quantile takes the budget, not a level"),
    ],
)
def test_a_value_that_cannot_be_is_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=f"^{words}"):
        SelectionSettings(**settings)


def test_every_choice_and_every_end_of_a_range_is_taken() -> None:
    choices: dict[str, Any] = {"score": SCORES, "mode": MODES, "repair": REPAIRS, "features": ("", *FEATURE_MODES)}
    for name, values in choices.items():
        for value in values:
            settings: dict[str, Any] = {name: value}
            assert getattr(SelectionSettings(**settings), name) == value
    for mode in THRESHOLDS:
        level = 0.0 if mode == "absolute" else None
        assert SelectionSettings(threshold_mode=mode, threshold=level).threshold_mode == mode
    for share in (0.0, 1.0):
        SelectionSettings(cloud_budget=share, prefix_rate=share, audit=share)
    for batch in (0, 1, 64):
        SelectionSettings(batch=batch)
    SelectionSettings(threshold_mode="absolute", threshold=math.inf)
    SelectionSettings(threshold_mode="maxnorm", threshold=0.5)


# -- the budget -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "grid", "expected"),
    [
        (0.06, Grid(16, 16), 15),
        (0.06, Grid(24, 24), 34),
        (0.06, Grid(32, 32), 61),
        (0.0, Grid(16, 16), 0),
        (1.0, Grid(16, 16), 256),
        (0.29, Grid(10, 10), 29),
        (0.07, Grid(10, 10), 7),
        (0.5, Grid(3, 3), 4),
    ],
)
def test_the_prefix_is_the_share_of_the_picture_rounded_down(rate: float, grid: Grid, expected: int) -> None:
    assert SelectionSettings(prefix_rate=rate).prefix(grid) == expected


@pytest.mark.parametrize("prefix_rate", [0.0, 0.06, 0.25])
@pytest.mark.parametrize("budget", [0.25, 0.3, 0.75, 1.0])
def test_prefix_and_judged_tokens_together_are_the_budget(budget: float, prefix_rate: float) -> None:
    grid, settings = Grid(16, 16), SelectionSettings(cloud_budget=budget, prefix_rate=prefix_rate)
    prefix = settings.prefix(grid)
    judged = settings.drafted_budget(grid) * (grid.size - prefix)
    assert prefix + judged == pytest.approx(budget * grid.size)


@pytest.mark.parametrize(
    ("budget", "prefix_rate", "expected"),
    [(0.0, 0.0, 0.0), (0.05, 0.06, 0.0), (0.5, 0.75, 0.0), (1.0, 0.06, 1.0), (0.3, 1.0, 0.0), (1.0, 1.0, 0.0)],
)
def test_a_prefix_that_eats_the_budget_leaves_nothing_to_judge(
    budget: float, prefix_rate: float, expected: float
) -> None:
    settings = SelectionSettings(cloud_budget=budget, prefix_rate=prefix_rate)
    assert settings.drafted_budget(Grid(16, 16)) == expected


# -- rule, repair and mode ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("repair", REPAIRS)
@pytest.mark.parametrize("rule", [None, *METHODS["ciar"].rules])
def test_rule_repair_and_mode_go_together_or_are_refused(rule: str | None, repair: str, mode: str) -> None:
    settings = SelectionSettings(mode=mode, repair=repair)
    found = RULES[rule] if rule else None
    if repair == "local" and rule == "block":
        with pytest.raises(SettingsError, match="repair: rule block judges a draft as a whole"):
            settings.check_rule(found)
    elif repair == "local" and rule == "mrs" and mode == "pipelined":
        with pytest.raises(SettingsError, match=r"repair: with rule mrs, local repair would judge .* sync or batched"):
            settings.check_rule(found)
    else:
        settings.check_rule(found)
