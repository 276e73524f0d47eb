"""What upcycle does for an order, as tables of what it is told and finds."""

from collections.abc import Sequence

import pytest

from kite_schemas.upcycle import (
    AdapterLimits,
    AdapterRef,
    AdapterRefused,
    AdapterVerified,
    BaseRef,
    EffectPrint,
    Resident,
    VerificationOrdered,
)
from kite_schemas.why import Reason, Why
from kite_upcycle import core
from kite_upcycle.verify import Report
from kite_upcycle.violations import Code, Violation, violation

DIGEST = "ab" * 32
OTHER = "cd" * 32
VERSION = "risk@abababababab"
PATH = f"store/sha256/{DIGEST}"
REQUEST = "00000000-0000-4000-8000-000000000001"
PRINT = EffectPrint(path=f"store/prints/{OTHER}.json", digest=OTHER, distance_micronats=5)

FRESH = Resident(blend="risk", version=VERSION, path=PATH)
PRINTED = FRESH.model_copy(update={"effect_print": PRINT})

ORDER = VerificationOrdered(
    node="n1",
    target="blend/risk",
    expires_us=1,
    ttl_us=1,
    request=REQUEST,
    blend="risk",
    adapter=AdapterRef(name="credit", path="adapters/credit", digest=DIGEST),
    base=BaseRef(name="tiny", path="/bases/tiny", digest=OTHER),
    limits=AdapterLimits(max_lora_rank=16, params_share_max_ppm=8_000),
    why=Why(reason=Reason.ASKED),
)


def report(*found: Violation, digest: str | None = DIGEST) -> Report:
    return Report(violations=found, notes=(), digest=digest, parameters=100, share_ppm=7, rank=4, modules=2)


@pytest.mark.parametrize(
    ("resident", "listed", "load", "effect_print"),
    [
        (FRESH, ("tiny",), True, None),
        (FRESH, ("tiny", VERSION), False, None),  # cut off after the load: it is there, only unproven
        (PRINTED, ("tiny",), True, PRINT),
        (PRINTED, ("tiny", VERSION), False, PRINT),
        (PRINTED, ("tiny", "risk@000000000000", "other@abababababab"), True, PRINT),
        (FRESH, (), True, None),
    ],
)
def test_a_version_is_loaded_only_when_it_is_not_there_and_proven_by_what_is_known_of_it(
    resident: Resident, listed: Sequence[str], load: bool, effect_print: EffectPrint | None
) -> None:
    assert core.plan_load(resident, listed) == core.Loading(load=load, effect_print=effect_print)


@pytest.mark.parametrize(
    ("version", "path", "digest"),
    [
        (VERSION, PATH, DIGEST),
        (VERSION, f"store/sha256/{OTHER}", None),  # another version's place
        ("other@abababababab", PATH, None),  # another blend's name
        (VERSION, "adapters/credit", None),
        (VERSION, f"{PATH}/", None),
        (VERSION, f"elsewhere/{PATH}", None),
    ],
)
def test_only_a_version_of_the_store_under_its_own_name_is_ever_loaded(
    version: str, path: str, digest: str | None
) -> None:
    assert core.stored_digest(Resident(blend="risk", version=version, path=path)) == digest


def test_a_stored_blend_is_named_by_its_content_and_has_no_print_yet() -> None:
    assert core.resident("risk", DIGEST) == FRESH


def test_an_adapter_that_keeps_the_contract_is_verified_with_its_size() -> None:
    told = core.verdict(ORDER, report(), 5)
    assert isinstance(told, AdapterVerified)
    assert (told.parameters, told.share_ppm, told.rank, told.duration_us) == (100, 7, 4, 5)
    assert (told.request, told.adapter) == (REQUEST, ORDER.adapter)


NAN = violation(Code.NOT_FINITE, "a tensor", expected="finite numbers", found="nan")
GONE = violation(Code.MISSING_FILE, "credit", expected="to exist", found="No such file")


@pytest.mark.parametrize(
    ("found", "codes"),
    [
        (report(NAN), ["not_finite"]),
        (report(digest=OTHER), ["digest_mismatch"]),
        (report(NAN, digest=OTHER), ["digest_mismatch", "not_finite"]),
        (report(GONE, digest=None), ["missing_file"]),
    ],
)
def test_every_broken_clause_is_told_and_a_change_of_the_files_first(found: Report, codes: list[str]) -> None:
    told = core.verdict(ORDER, found, 5)
    assert isinstance(told, AdapterRefused)
    assert [broken.code for broken in told.violations] == codes
    assert told.total == len(codes)


def test_a_refusal_shows_the_first_64_violations_and_counts_all() -> None:
    told = core.verdict(ORDER, report(*[NAN] * 70), 5)
    assert isinstance(told, AdapterRefused)
    assert (len(told.violations), told.total) == (64, 70)


def test_a_changed_adapter_is_told_with_both_digests() -> None:
    told = core.verdict(ORDER, report(digest=OTHER), 5)
    assert isinstance(told, AdapterRefused)
    (changed,) = told.violations
    assert (changed.where, changed.expected, changed.found) == ("adapters/credit", DIGEST, OTHER)
