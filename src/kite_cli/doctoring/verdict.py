"""What a check says."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kite_cli.doctoring.facts import Unknown


class Verdict(StrEnum):
    """How it is, from best to worst; what is unknown may be either."""

    OK = "ok"
    UNKNOWN = "unknown"
    WARNING = "warning"
    PROBLEM = "problem"


ORDER = tuple(Verdict)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `silent` where the bus or the ledger did not answer."""

    check: str
    verdict: Verdict
    found: str
    hint: str = ""
    silent: bool = False


Said = tuple[Verdict, str, str]
"""A verdict with what was found and what to do about it, before it has the name of its check."""


def ok(check: str, found: str) -> Finding:
    """Return that all is well."""
    return Finding(check, Verdict.OK, found)


def unknown(check: str, fact: Unknown) -> Finding:
    """Return that a fact could not be had: a problem where something was asked that has to answer."""
    verdict = Verdict.PROBLEM if fact.silent or fact.wrong else Verdict.UNKNOWN
    return Finding(check, verdict, fact.why, fact.hint, fact.silent)


def worst(check: str, said: Sequence[Said], well: str) -> Finding:
    """Return the worst of several, and beside it what else is as bad; `well` when there is none.

    >>> worst("disk", [(Verdict.WARNING, "a", "x"), (Verdict.PROBLEM, "b", "y"), (Verdict.PROBLEM, "c", "z")], "fine")
    Finding(check='disk', verdict=<Verdict.PROBLEM: 'problem'>, found='b; c', hint='y; z', silent=False)
    >>> worst("disk", [], "fine").found
    'fine'
    """
    if not said:
        return ok(check, well)
    verdict = max((one[0] for one in said), key=ORDER.index)
    as_bad = [one for one in said if one[0] is verdict]
    hints = dict.fromkeys(hint for _, _, hint in as_bad if hint)
    return Finding(check, verdict, "; ".join(found for _, found, _ in as_bad), "; ".join(hints))
