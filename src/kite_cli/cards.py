"""What `kite adapter list` and `kite adapter show` say."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kite_cli.output import note, percent, say_json, show, size, table
from kite_cli.upcycle import show_violations

if TYPE_CHECKING:
    from kite_upcycle.base import Base
    from kite_upcycle.card import Card

SHORT_CHARS = 12


def print_list(cards: "Sequence[Card]", root: Path, base: "Base | None", *, as_json: bool) -> None:
    """Print one line for each adapter; names are paths below the folder that was named."""
    header = ("NAME", "DIGEST", "RANK", "ALPHA", "TARGETS", "PARAMETERS", "SHARE", "SIZE", "STAMP")
    show([record_of(card, base) for card in cards], header, [_row(card, root, base) for card in cards], as_json=as_json)
    if not cards:
        note(f"no adapter lies at {root} or below")


def _row(card: "Card", root: Path, base: "Base | None") -> list[str]:
    return [
        str(card.path.relative_to(root)) if card.path != root else card.path.resolve().name,
        (card.digest or "unreadable")[:SHORT_CHARS],
        str(card.rank),
        _alpha(card),
        _targets(card),
        str(card.parameters),
        _share(card, base),
        size(card.size_bytes),
        _stamp(card),
    ]


def print_card(card: "Card", base: "Base | None", *, as_json: bool) -> None:
    """Print one adapter, a field a line, and what is wrong with it."""
    if as_json:
        say_json(record_of(card, base))
        return
    table(("FIELD", "VALUE"), list(_fields(card, base)))
    if card.violations:
        show_violations(card.violations)


def _fields(card: "Card", base: "Base | None") -> Iterator[tuple[str, str]]:
    yield "name", card.path.resolve().name
    yield "digest", card.digest or "unreadable"
    yield "rank", str(card.rank)
    yield "alpha", _alpha(card)
    yield "targets", _targets(card)
    yield "modules", str(card.modules)
    yield "parameters", str(card.parameters)
    if base is not None:
        yield "share of the base", _share(card, base)
    yield "dtype", ", ".join(card.dtypes)
    yield "size", size(card.size_bytes)
    yield "base by its configuration", card.base_name or "not named"
    yield "stamp", _stamp(card)
    yield from () if card.stamp is None else card.stamp.metadata().items()


def record_of(card: "Card", base: "Base | None") -> dict[str, object]:
    """Return the line of JSON on one adapter."""
    settings = card.settings
    return {
        "adapter": str(card.path),
        "name": card.path.resolve().name,
        "digest": card.digest,
        "rank": card.rank,
        "alpha": settings and settings.alpha,
        "rslora": settings and settings.rslora,
        "targets": settings and settings.targets,
        "modules": card.modules,
        "parameters": card.parameters,
        "share_ppm": None if base is None else _ppm(card, base),
        "dtypes": card.dtypes,
        "size_bytes": card.size_bytes,
        "base_name": card.base_name,
        "stamp": card.stamp and card.stamp.metadata(),
        "violations": [{**vars(violation), "text": str(violation)} for violation in card.violations],
    }


def _ppm(card: "Card", base: "Base") -> int:
    from kite_upcycle.verify import share_ppm

    return share_ppm(card.parameters, base)


def _share(card: "Card", base: "Base | None") -> str:
    return "" if base is None else percent(_ppm(card, base))


def _alpha(card: "Card") -> str:
    if card.settings is None:
        return ""
    return f"{card.settings.alpha:g}{' (rsLoRA)' if card.settings.rslora else ''}"


def _targets(card: "Card") -> str:
    from kite_upcycle.violations import clip

    if card.settings is None:
        return ""
    targets = card.settings.targets
    return clip(targets if isinstance(targets, str) else ",".join(targets))


def _stamp(card: "Card") -> str:
    """Say which version the stamp is of, or that there is none, or none that can be read."""
    if card.stamp is not None:
        return f"version {card.stamp.version}, base {card.stamp.base[:SHORT_CHARS]}"
    stamped = any(violation.code.startswith("stamp_") for violation in card.violations)
    return "unreadable" if stamped else "none"
