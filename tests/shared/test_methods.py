"""The table of methods: consistent with itself, defaults first, and honest about the law of what it names."""

from __future__ import annotations

import pytest

from shared.errors import SettingsError
from shared.methods import METHODS, RULES, Method, Rule, find_method, find_rule, law


def test_entries_are_found_by_their_own_names() -> None:
    assert all(find_method(name).name == name for name in METHODS)
    assert all(rule.name == name for name, rule in RULES.items())


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_method_takes_known_rules_the_first_by_default(method: Method) -> None:
    for name in method.rules:
        assert find_rule(method, name) is RULES[name]
    assert find_rule(method, "") is (RULES[method.rules[0]] if method.rules else None)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_method_that_judges_repairs_and_one_that_does_not_judge_does_not(method: Method) -> None:
    assert (method.repair == "-") == (not method.rules)
    assert (method.draft_source == "-") <= (not method.rules)
    assert method.device_role != "-"
    assert method.summary


def test_every_rule_is_taken_by_some_method() -> None:
    assert set(RULES) == {name for method in METHODS.values() for name in method.rules}


@pytest.mark.parametrize(
    ("method", "rule", "expected"),
    [
        ("ar", "", "lossless"),
        ("device", "", "lossy"),
        ("sd", "gumbel", "lossless"),
        ("sd", "mrs", "lossless"),
        ("sd", "block", "lossless"),
        ("ciar", "gumbel", "lossy"),
        ("ciar", "mrs", "lossy"),
        ("ciar", "block", "lossy"),
    ],
)
def test_the_law_of_each_method(method: str, rule: str, expected: str) -> None:
    found = find_method(method)
    assert law(found, find_rule(found, rule)) == expected


def test_the_rule_decides_the_law_of_a_method_that_judges() -> None:
    lossy = Rule("relaxed", lossless=False, needs_draft_probs=True, summary="accepts more")
    assert law(METHODS["sd"], lossy) == "lossy"


def test_gumbel_alone_needs_no_draft_rows() -> None:
    assert {name for name, rule in RULES.items() if not rule.needs_draft_probs} == {"gumbel"}


@pytest.mark.parametrize("name", ["", "AR", "eagle"])
def test_an_unknown_method_is_refused_with_the_list_of_those_there_are(name: str) -> None:
    with pytest.raises(SettingsError, match=f"method: {name!r} is unknown; there are ar, device, sd, ciar"):
        find_method(name)


def test_a_rule_that_a_method_does_not_take_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"rule: method sd takes gumbel, mrs, block.*, not 'threshold'"):
        find_rule(METHODS["sd"], "threshold")
    with pytest.raises(SettingsError, match=r"method ar judges nothing, so it takes no rule \('mrs' was given\)"):
        find_rule(METHODS["ar"], "mrs")
