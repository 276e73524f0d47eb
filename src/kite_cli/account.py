"""The account of one decision, as text and as JSON."""

from collections.abc import Iterator, Sequence

from kite_cli.output import columns, duration, moment, short
from kite_incident.explain import Event, Explanation, Input
from kite_incident.timeline import detail
from kite_schemas.why import RuleValue


def lines(explanation: Explanation) -> Iterator[str]:
    """Yield the account line by line."""
    event, why = explanation.event, explanation.decision.why
    yield f"{short(event.type)} of {event.subject} at position {event.pos}, {moment(event.at_us)}"
    facts = [
        ("  reason", str(why.reason)),
        *([("  says", said)] if (said := detail(explanation.decision)) else []),
        ("  id", event.id),
        ("  policy", (why.policy or "none")),
        ("  trace", event.trace_id or "none"),
    ]
    yield from columns(facts)
    yield from _section("rules", ("RULE", "VALUE", "THRESHOLD", "MARGIN", ""), _rules(explanation))
    candidates = [(c.id, "chosen" if c.chosen else "not chosen", str(c.reason)) for c in why.candidates]
    yield from _section("candidates", ("CANDIDATE", "", "REASON"), candidates)
    inputs = [(*_cells(found.event), _age(found), found.said) for found in explanation.inputs]
    yield from _section("inputs", ("POS", "EVENT", "SUBJECT", "AGE", "SAID"), inputs)
    yield from _section("caused by", ("POS", "EVENT", "SUBJECT"), [_cells(found) for found in explanation.causes])
    followed = [_cells(found) for found in explanation.consequences]
    yield from _section("brought about", ("POS", "EVENT", "SUBJECT"), followed)


def brief(explanation: Explanation) -> Iterator[str]:
    """Yield the account in a few lines: what was decided and why, and with which margins."""
    event, why = explanation.event, explanation.decision.why
    yield f"{short(event.type)} of {event.subject} at position {event.pos}: {why.reason}"
    if said := detail(explanation.decision):
        yield f"  {said}"
    yield from (f"  {' '.join(filter(None, row))}" for row in _ruled(explanation))


def _ruled(explanation: Explanation) -> Iterator[tuple[str, ...]]:
    for name, value, threshold, margin, mark in _rules(explanation):
        yield name, value, f"(limit {threshold}, margin {margin})", mark


def _section(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if rows:
        yield ""
        yield title
        yield from (f"  {line}" for line in columns([header, *rows]))


def _rules(explanation: Explanation) -> list[tuple[str, ...]]:
    decisive = explanation.decisive
    return [
        (rule.id, str(rule.value), str(rule.threshold), f"{rule.margin:+}", _mark(rule, decisive))
        for rule in explanation.decision.why.rules
    ]


def _mark(rule: RuleValue, decisive: RuleValue | None) -> str:
    words = [word for word, holds in (("fired", rule.fired), ("nearest to flipping", rule == decisive)) if holds]
    return ", ".join(words)


def _age(found: Input) -> str:
    return f"{duration(found.age_us)} {'since sampled' if found.sampled else 'old'}"


def _cells(event: Event) -> tuple[str, str, str]:
    return str(event.pos), short(event.type), event.subject


def record(explanation: Explanation) -> dict[str, object]:
    """Return the account as JSON."""
    decisive = explanation.decisive
    return {
        **_event(explanation.event),
        "data": explanation.decision.model_dump(mode="json"),
        "reason": explanation.decision.why.reason,
        "decisive": decisive.model_dump(mode="json") if decisive else None,
        "causes": [_event(found) for found in explanation.causes],
        "inputs": [
            {**_event(found.event), "age_us": found.age_us, "sampled": found.sampled, "said": found.said}
            for found in explanation.inputs
        ],
        "consequences": [_event(found) for found in explanation.consequences],
    }


def _event(event: Event) -> dict[str, object]:
    return {
        "pos": event.pos,
        "id": event.id,
        "type": event.type,
        "subject": event.subject,
        "at": moment(event.at_us),
        "at_us": event.at_us,
        "trace_id": event.trace_id,
    }
