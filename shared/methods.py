"""The table of methods: a draft source x an acceptance rule x a repair.

The command line's help, the verifier's `Describe` reply, the documentation and the benchmarks read this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shared.errors import SettingsError

__all__ = ["METHODS", "RULES", "Method", "Option", "Rule", "find_method", "find_rule", "law"]

LOSSLESS, LOSSY = "lossless", "lossy"


@dataclass(frozen=True, slots=True)
class Option:
    """A number that a rule takes, with its default and its range."""

    name: str
    default: float
    least: float
    most: float
    summary: str


@dataclass(frozen=True, slots=True)
class Rule:
    """An acceptance rule for drafted tokens.

    Args:
        name: name on the wire and on the command line.
        lossless: the output law is exactly the warped target's.
        needs_draft_probs: the cloud needs the draft's distribution, which its shadow drafter recomputes.
        summary: one line for help texts.
        options: numbers it takes.
    """

    name: str
    lossless: bool
    needs_draft_probs: bool
    summary: str
    options: tuple[Option, ...] = ()

    def settings(self, given: Mapping[str, float]) -> dict[str, float]:
        """The value of every option, the default where none is given.

        Raises:
            SettingsError: an option the rule does not know, or a value out of its range; the message names it.
        """
        known = {option.name: option for option in self.options}
        for name, value in given.items():
            if name not in known:
                has = f"it takes {', '.join(known)}" if known else "it takes none"
                raise SettingsError(f"rule option {name}: rule {self.name} does not know it; {has}")
            if not known[name].least <= value <= known[name].most:
                low, high = known[name].least, known[name].most
                raise SettingsError(f"rule option {name}: {low:g} to {high:g} is needed, not {value:g}")
        return {name: given.get(name, option.default) for name, option in known.items()}


@dataclass(frozen=True, slots=True)
class Method:
    """A way to split the work between device and cloud.

    Args:
        name: name on the wire and on the command line.
        draft_source: what proposes tokens.
        rules: names of acceptance rules it takes, the default first; empty when nothing is judged.
        repair: what happens after a rejection.
        device_role, cloud_role: what each side does; `-` when a side has no part.
        lossless: the output law is exactly the warped target's, if the rule in use is lossless too.
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
        Rule("exact", True, True, "modified rejection sampling at every place of a window"),
        Rule(
            "csd",
            False,
            True,
            "accepts more where the target's entropy is high and the draft is near (CSD)",
            (
                Option("lambda", 0.5, 0.0, 100.0, "weight of the entropy"),
                Option("delta", 0.35, 0.0, 1.0, "cap on a token's total variation to the target"),
                Option("normalised", 0.0, 0.0, 1.0, "1: entropy as a share of ln V instead of nats"),
            ),
        ),
        Rule("addition", False, True, "accepts with a constant more", (Option("epsilon", 0.1, 0.0, 1.0, "added"),)),
        Rule("amplify", False, True, "accepts with a factor more", (Option("factor", 1.3, 1.0, 1000.0, "factor"),)),
        Rule(
            "cool",
            False,
            True,
            "amplifies the first tokens of a draft most (COOL-SD)",
            (Option("delta", 2.0, 1.0, 1000.0, "largest factor"), Option("nu", 0.7, 0.0, 10.0, "how fast it falls")),
        ),
        Rule(
            "gsd",
            False,
            True,
            "pools tokens of like probability whose codes look alike (GSD)",
            (
                Option("group", 14.0, 1.0, 1024.0, "tokens pooled at most"),
                Option("spread", 0.15, 0.0, 1.0, "largest difference of their probabilities"),
                Option("similarity", 0.5, -1.0, 1.0, "least cosine of their codes"),
            ),
        ),
        Rule(
            "lantern",
            False,
            True,
            "pools the nearest codes of a token (LANTERN)",
            (
                Option("neighbours", 100.0, 1.0, 100000.0, "codes pooled at most"),
                Option("delta", 0.1, 0.0, 1.0, "mass pooled at most"),
            ),
        ),
    )
}
_RELAXED = ("csd", "addition", "amplify", "cool", "gsd", "lantern")

METHODS = {
    method.name: method
    for method in (
        Method("ar", "-", (), "-", "viewer", "sampler", True, "the cloud samples every token, the device views"),
        Method("device", "device drafter", (), "-", "solo", "-", False, "the device draws the whole picture alone"),
        Method(
            "sd",
            "device drafter",
            ("gumbel", "mrs", "block", *_RELAXED),
            "truncate",
            "drafter",
            "verifier",
            True,
            "the device drafts, the cloud verifies every token",
        ),
        Method(
            "ciar",
            "device drafter, uncertain tokens only",
            ("gumbel", "mrs", "block"),
            "truncate or local",
            "selective drafter",
            "interval verifier",
            False,
            "the device keeps what it is sure of, the cloud verifies the rest",
        ),
        Method(
            "sjd",
            "previous Jacobi rows",
            ("exact", "gumbel", *_RELAXED),
            "continue or stop",
            "viewer",
            "window decoder",
            True,
            "the target drafts for itself: a window of tokens is refined in every pass",
        ),
        Method(
            "csd",
            "previous Jacobi rows",
            ("csd",),
            "continue or stop",
            "viewer",
            "window decoder",
            True,
            "sjd with the entropy-relaxed rule",
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
    return LOSSLESS if method.lossless and (rule is None or rule.lossless) else LOSSY
