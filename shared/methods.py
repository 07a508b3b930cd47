"""The table of methods: a draft source x an acceptance rule x a repair.

The command line's help, the verifier's `Describe` reply, the documentation and the benchmarks read this table.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import SettingsError

__all__ = ["METHODS", "RULES", "Method", "Rule", "find_method", "find_rule", "law"]

LOSSLESS, LOSSY = "lossless", "lossy"


@dataclass(frozen=True, slots=True)
class Rule:
    """An acceptance rule for drafted tokens.

    Args:
        name: name on the wire and on the command line.
        lossless: the output law is exactly the warped target's.
        needs_draft_probs: the cloud needs the draft's distribution, which its shadow drafter recomputes.
        summary: one line for help texts.
    """

    name: str
    lossless: bool
    needs_draft_probs: bool
    summary: str


@dataclass(frozen=True, slots=True)
class Method:
    """A way to split the work between device and cloud.

    Args:
        name: name on the wire and on the command line.
        draft_source: what proposes tokens.
        rules: names of acceptance rules it takes, the default first; empty when nothing is judged.
        repair: what happens after a rejection.
        device_role, cloud_role: what each side does; `-` when a side has no part.
        lossless: law of a method without rules; with rules the rule decides.
        summary: one line for help texts.
    """

    name: str
    draft_source: str
    rules: tuple[str, ...]
    repair: str
    device_role: str
    cloud_role: str
    lossless: bool
    summary: str


RULES = {
    rule.name: rule
    for rule in (
        Rule("gumbel", True, False, "both sides share the noise; the output is the cloud's own sample"),
        Rule("mrs", True, True, "modified rejection sampling, token by token"),
        Rule("block", True, True, "block verification: judges the draft as a whole, never worse than mrs"),
    )
}

METHODS = {
    method.name: method
    for method in (
        Method("ar", "-", (), "-", "viewer", "sampler", True, "the cloud samples every token, the device views"),
        Method("device", "device drafter", (), "-", "solo", "-", False, "the device draws the whole picture alone"),
        Method(
            "sd",
            "device drafter",
            ("gumbel", "mrs", "block"),
            "truncate",
            "drafter",
            "verifier",
            True,
            "the device drafts, the cloud verifies every token",
        ),
    )
}


def find_method(name: str) -> Method:
    """The method of that name.

    Raises:
        SettingsError: no such method; the message lists those there are.
    """
    if name not in METHODS:
        raise SettingsError(f"method: {name!r} is unknown; there are {', '.join(METHODS)}")
    return METHODS[name]


def find_rule(method: Method, name: str) -> Rule | None:
    """The rule of that name, or the method's default when `name` is empty; None when the method judges nothing.

    Raises:
        SettingsError: the method does not take such a rule.
    """
    if not method.rules:
        if name:
            raise SettingsError(f"rule: method {method.name} judges nothing, so it takes no rule ({name!r} was given)")
        return None
    if name and name not in method.rules:
        raise SettingsError(f"rule: method {method.name} takes {', '.join(method.rules)}, not {name!r}")
    return RULES[name or method.rules[0]]


def law(method: Method, rule: Rule | None) -> str:
    """`lossless` when the output law is exactly the warped target's, else `lossy`."""
    return LOSSLESS if (rule.lossless if rule else method.lossless) else LOSSY
