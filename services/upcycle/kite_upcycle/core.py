"""What to do for an order, from what is found: pure functions, no I/O."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from kite.proof.prints import place
from kite_schemas.upcycle import (
    VIOLATIONS_MAX,
    AdapterRefused,
    AdapterVerified,
    BlendStored,
    DeleteOrdered,
    EffectPrint,
    InjectionAdmitted,
    RebuildOrdered,
    Resident,
    VerificationOrdered,
    Violation,
)
from kite_upcycle import blend, violations
from kite_upcycle.base import Base
from kite_upcycle.store import Version, served_name
from kite_upcycle.verify import Limits, Report, share_ppm

STORE = "store"
"""Folder of the store below the adapter root."""

DIGEST_MISMATCH = "digest_mismatch"
BASE_MISMATCH = "base_mismatch"

_STORED = re.compile(rf"{STORE}/sha256/(?P<digest>[0-9a-f]{{64}})")


@dataclass(frozen=True, slots=True)
class Loading:
    """The plan of a load: whether the engine has to be given the version, and the print that its proof is held against.

    Without a print the version is proven against the base, which makes its print.
    """

    load: bool
    effect_print: EffectPrint | None


def plan_load(resident: Resident, listed: Collection[str]) -> Loading:
    """Plan from the names that the engine lists: a version that is there already is only proven."""
    return Loading(load=resident.version not in listed, effect_print=resident.effect_print)


def former(resident: Resident, listed: Sequence[str]) -> str | None:
    """Return the version of the same blend that an engine loaded last, None when it has no other one.

    Engines list names in the order in which they were loaded.
    """
    others = [name for name in listed if name != resident.version and name.rpartition("@")[0] == resident.blend]
    return others[-1] if others else None


def stored_digest(resident: Resident) -> str | None:
    """Return the digest that a resident's path names, None unless the path is the store's and fits the version.

    Nothing else is ever loaded: the name and the path of a version are the key of the engine's prefix cache.
    """
    found = _STORED.fullmatch(resident.path)
    if found is None or served_name(resident.blend, found["digest"]) != resident.version:
        return None
    return found["digest"]


def resident(name: str, digest: str) -> Resident:
    """Return a stored version of a blend as instances hold it; it has no print before its first proof."""
    return Resident(blend=name, version=served_name(name, digest), path=f"{STORE}/sha256/{digest}")


def deletable(order: DeleteOrdered) -> bool:
    """Say whether an order names a version of the store under its own name, and a print where prints lie.

    Nothing else below the adapter root is ever deleted.
    """
    own = resident(order.blend, order.digest).version == order.version
    seen = order.effect_print
    return own and (seen is None or seen.path == place(seen.digest))


def limits(order: VerificationOrdered) -> Limits:
    """Return what the adapter may be at most."""
    given = order.limits
    return Limits(max_lora_rank=given.max_lora_rank, params_share_max_ppm=given.params_share_max_ppm)


def number(held: Collection[int] | None) -> int | None:
    """Return how many slots of an engine are taken, None when it does not tell."""
    return None if held is None else len(held)


def members(order: InjectionAdmitted | RebuildOrdered) -> tuple[blend.Member, ...]:
    """Return the members of an admitted blend; their paths start at the adapter root."""
    return tuple(
        blend.Member(path=Path(member.adapter.path), weight_ppm=member.weight_ppm, digest=member.adapter.digest)
        for member in order.members
    )


def verdict(order: VerificationOrdered, report: Report, duration_us: int) -> AdapterVerified | AdapterRefused:
    """Return the outcome of a verification that came to its end."""
    broken = broken_clauses(order, report)
    if broken:
        return refused(order, broken, duration_us)
    return AdapterVerified(
        request=order.request,
        adapter=order.adapter,
        parameters=report.parameters,
        share_ppm=report.share_ppm,
        rank=report.rank,
        duration_us=duration_us,
    )


def broken_clauses(order: VerificationOrdered, report: Report) -> tuple[Violation, ...]:
    """Return every violation of a report; first of all, that the files are not those of the request."""
    listed = tuple(map(_told, report.violations))
    if report.digest is None or report.digest == order.adapter.digest:
        return listed
    return (_changed(order, report.digest), *listed)


def refused(order: VerificationOrdered, broken: tuple[Violation, ...], duration_us: int) -> AdapterRefused:
    """Return the refusal of an adapter: the first 64 violations, and how many there are."""
    return AdapterRefused(
        request=order.request,
        adapter=order.adapter,
        violations=broken[:VIOLATIONS_MAX],
        total=len(broken),
        duration_us=duration_us,
    )


def unfinished(stage: str, code: str, message: str) -> Violation:
    """Return the violation of an adapter whose verification did not come to its end."""
    return Violation(code=code, where=stage, expected="a verification that ends", found=message)


def stored(order: InjectionAdmitted | RebuildOrdered, version: Version, base: Base, duration_us: int) -> BlendStored:
    """Return the outcome of a blend that is in the store; everything about it is read from its manifest."""
    manifest = version.manifest
    return BlendStored(
        request=order.request,
        resident=resident(order.blend, version.digest),
        digest=version.digest,
        method=manifest.method,
        rank=manifest.rank,
        residual_ppm=manifest.residual_ppm,
        share_ppm=share_ppm(manifest.parameters, base),
        size_bytes=version.size_bytes,
        duration_us=duration_us,
    )


def _told(found: violations.Violation) -> Violation:
    return Violation(code=found.code, where=found.where, expected=found.expected, found=found.found)


def _changed(order: VerificationOrdered, digest: str) -> Violation:
    return Violation(code=DIGEST_MISMATCH, where=order.adapter.path, expected=order.adapter.digest, found=digest)
