"""How settings are named and their values read: exactly, in the units people use, and refused in words they know."""

import pytest
from pydantic import JsonValue

from kite.errors import UsageError
from kite_arbitrator import shipped
from kite_cli.aliases import ALIASES, UNITS, Named, bare, guess, read, resolve, unit_of
from kite_cli.bounds import Setting, fits, settings, takes, wanted
from kite_cli.config import pairs
from kite_schemas.policy import Change, amend, flatten

FLAT = flatten(shipped.policy())
INT64_MAX = 2**63 - 1


def setting(kind: str, *choices: JsonValue, optional: bool = False) -> Setting:
    return Setting("a.b", "", kind, None, None, choices, optional)


def test_every_alias_means_a_setting_that_exists_and_no_other_one():
    assert set(ALIASES.values()) <= FLAT.keys()
    assert not ALIASES.keys() & FLAT.keys()


@pytest.mark.parametrize(
    ("name", "text", "key", "value"),
    [
        ("upcycle.weight_decay", "0.93", "upcycle.weight_decay_ppm", 930_000),
        ("arbitrator.semantic_guard_kl_threshold", "0.32", "guard.kl_max_micronats", 320_000),
        ("arbitrator.enable_semantic_guard", "true", "guard.enabled", True),
        ("arbitrator.semantic_guard_freeze", "15", "guard.freeze_us", 15_000_000),
        ("upcycle.weight_decay_pressure", "0.71", "upcycle.weight_decay_pressure_ppm", 710_000),
        ("yoco.reserve_pool", "23%", "yoco.reserve_pressure_ppm", 230_000),
        ("yoco.reserve_memory", "1.8GB", "yoco.reserve_bytes", 1_800_000_000),
        ("arbitrator.concurrency_threshold", "1000", "arbitration.concurrency_max", 1_000),
        ("arbitrator.sustained", "5", "arbitration.sustained_us", 5_000_000),
        ("arbitrator.cache_miss_jump", "15%", "arbitration.miss_jump_ppm", 150_000),
        ("arbitrator.memory_fragmentation", "0.35", "arbitration.fragmentation_max_ppm", 350_000),
        ("arbitrator.kv_cache_hit_rate", "82 %", "arbitration.hit_rate_min_ppm", 820_000),
        ("arbitrator.latency_sigma", "12ms", "arbitration.latency_sigma_max_us", 12_000),
        ("arbitrator.jitter_window", "137ms", "arbitration.switch_window_us", 137_000),
        ("arbitrator.injection_rate", "2.5", "arbitration.injection_rate_max_milli", 2_500),
        ("arbitrator.decision_deadline", "0.017", "arbitration.decision_deadline_us", 17_000),
        ("arbitrator_sync_timeout", "33ms", "arbitration.sync_timeout_us", 33_000),
        ("arbitrator.tcp_sync_timeout", "87ms", "arbitration.sync_timeout_reliable_us", 87_000),
        ("arbitrator.udp_loss", "5%", "arbitration.loss_max_ppm", 50_000),
        ("arbitrator.udp_loss_times", "3", "arbitration.loss_windows", 3),
        ("arbitrator.sync_timeout_us", "33000", "arbitration.sync_timeout_us", 33_000),  # a name with the unit: in it
    ],
)
def test_the_names_of_the_source_documents_are_known(name: str, text: str, key: str, value: JsonValue):
    assert wanted(settings(), resolve(FLAT, name), text) == Change(key=key, value=value)


def test_the_figures_of_the_source_documents_are_what_is_shipped():
    for name, text in (
        ("upcycle.weight_decay", "0.93"),
        ("upcycle.weight_decay_pressure", "0.71"),
        ("upcycle.params_share_max", "0.8%"),
        ("yoco.cold_start_deadline", "417ms"),
        ("yoco.reserve_pool", "23%"),
        ("yoco.reserve_memory", "1.8GB"),
        ("arbitrator.sustained", "5s"),
        ("arbitrator.cache_miss_jump", "15%"),
        ("arbitrator.memory_fragmentation", "35%"),
        ("arbitrator.kv_cache_hit_rate", "82%"),
        ("arbitrator.latency_sigma", "12ms"),
        ("arbitrator.jitter_window", "137ms"),
        ("arbitrator.decision_deadline", "17ms"),
        ("arbitrator_sync_timeout", "33ms"),
        ("arbitrator.tcp_sync_timeout", "87ms"),
        ("arbitrator.udp_loss", "5%"),
        ("arbitrator.udp_loss_times", "3"),
        ("arbitrator.semantic_guard_kl_threshold", "0.32"),
        ("arbitrator.semantic_guard_freeze", "15s"),
    ):
        change = wanted(settings(), resolve(FLAT, name), text)
        assert (change.key, change.value) == (change.key, FLAT[change.key])


@pytest.mark.parametrize("text", ["unset", "null", " unset "])
def test_a_limit_can_be_unset_and_a_number_that_is_needed_cannot(text: str):
    for name in ("arbitration.concurrency_max", "arbitration.switch_window", "arbitrator.jitter_window"):
        named = resolve(FLAT, name)
        assert wanted(settings(), named, text) == Change(key=named.key, value=None)
    for name in ("upcycle.weight_min_ppm", "upcycle.weight_decay", "guard.enabled", "rules", "fleet.pools"):
        with pytest.raises(UsageError, match=r"cannot be unset: it takes") as error:
            wanted(settings(), resolve(FLAT, name), text)
        assert error.value.hint


def test_every_setting_may_be_named_without_its_unit():
    for key in FLAT:
        assert resolve(FLAT, bare(key)).key == key
        assert resolve(FLAT, key) == Named(key, key)


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("a_ppm", "930000", 930_000),
        ("a_ppm", "93%", 930_000),
        ("a_ppm", "0.5 ppm", None),
        ("a", "0.93", 930_000),
        ("a", ".93", 930_000),
        ("a", "93 %", 930_000),
        ("a", "9.3e-1", 930_000),
        ("a", "930000 ppm", 930_000),
        ("a", "0.0000001", None),
        ("a", "0.930000000000000000000000000000000001", None),  # 28 digits would round it to a whole number
        ("a", "1e999999999", None),
        ("a", "1e-999999999", None),
        ("a", "inf", None),
        ("a", "nan", None),
        ("a", "1/3", None),
        ("a", "90s", None),
        ("a", "", None),
        ("t_us", "417ms", 417_000),
        ("t_us", "417", 417),
        ("t", "0.417", 417_000),
        ("t", "417ms", 417_000),
        ("t", "90s", 90_000_000),
        ("t", "1.5 m", 90_000_000),
        ("t", "1h", 3_600_000_000),
        ("t", "1d", 86_400_000_000),
        ("t", "7us", 7),
        ("t", "0.5us", None),
        ("t", "5 parsecs", None),
        ("k", "0.32", 320_000),
        ("k", "0.32nats", 320_000),
        ("k_micronats", "320000", 320_000),
        ("k", "1e-7", None),
        ("m", "2.5", 2_500),
        ("m", "0.0005", None),
        ("m_milli", "7", 7),
        ("b", "1.8GB", 1_800_000_000),
        ("b", "2GiB", 2_147_483_648),
        ("b", "7", 7),
        ("b", "0.5B", None),
        ("b_bytes", "512MiB", 536_870_912),
        ("b_bytes", "512", 512),
    ],
)
def test_values_are_exact_or_refused(key: str, text: str, expected: int | None):
    keys = {"a": "a_ppm", "t": "t_us", "k": "k_micronats", "m": "m_milli", "b": "b_bytes"}
    named = Named(key, keys.get(key, key))
    if expected is None:
        with pytest.raises(UsageError):
            read(named, text)
    else:
        assert read(named, text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("true", True), ("null", None), ("[1]", [1]), ("word", "word"), ("[" * 99_999, "[" * 99_999)]
)
def test_without_a_unit_a_value_is_json_or_a_word(text: str, expected: JsonValue):
    assert read(Named("rules", "rules"), text) == expected


@pytest.mark.parametrize(
    ("given", "first"),
    [
        ("upcycle.weight_dekay", "upcycle.weight_decay"),
        ("upcycle.weight_decay_pmm", "upcycle.weight_decay_ppm"),
        ("Upcycle.Weight_Min_PPM", "upcycle.weight_min_ppm"),
        ("weight_min", "upcycle.weight_min"),
        ("decay", "upcycle.weight_decay_ppm"),
        ("fleet.pool", "fleet.pools"),
    ],
)
def test_an_unknown_name_is_answered_with_what_may_be_meant(given: str, first: str):
    assert guess(FLAT, given)[0] == first
    with pytest.raises(UsageError, match=f"unknown setting '{given}'") as error:
        resolve(FLAT, given)
    assert f"did you mean {first}" in error.value.hint


@pytest.mark.parametrize("given", ["", "zzz", "🛠", "x" * 10_000])
def test_nothing_is_guessed_from_nothing(given: str):
    assert guess(FLAT, given) == []
    with pytest.raises(UsageError) as error:
        resolve(FLAT, given)
    assert "did you mean" not in error.value.hint


def test_every_setting_says_what_it_takes_and_takes_what_is_shipped():
    known = settings()
    assert list(known) == list(FLAT)
    for key, value in FLAT.items():
        assert known[key].meaning
        assert fits(known[key], value)
        assert takes(known[key])


@pytest.mark.parametrize("key", [key for key in FLAT if unit_of(key)])
def test_bounds_are_those_of_the_policy_from_both_sides(key: str):
    found = settings()[key]
    assert found.lowest is not None
    assert found.highest is not None
    for value in (found.lowest, found.highest):
        assert fits(found, value)
        amend(shipped.policy(), [Change(key=key, value=value)])
    assert fits(found, None) is found.optional
    for value in (found.lowest - 1, found.highest + 1, 0.5, True, "1", *(() if found.optional else (None,))):
        assert not fits(found, value)
        with pytest.raises(ValueError, match=key):
            amend(shipped.policy(), [Change(key=key, value=value)])


@pytest.mark.parametrize(
    ("found", "said", "inside", "outside"),
    [
        (setting("boolean"), "true or false", False, 0),
        (setting("string"), "a text", "x", 1),
        (setting("string", "a", "b"), 'one of "a", "b"', "b", "c"),
        (setting("integer", 1), "only 1", 1, True),
        (setting("integer", optional=True), "a whole number, or unset", None, "x"),
        (setting("array"), "a JSON list", [], None),
    ],
)
def test_kinds_of_settings(found: Setting, said: str, inside: JsonValue, outside: JsonValue):
    assert takes(found) == said
    assert fits(found, inside)
    assert not fits(found, outside)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("upcycle.weight_min", "2", "parts per million from 0 to 1000000, not '2' (2000000)"),
        ("expiry.wake_us", "0", "a whole number of microseconds, 1 or more, not '0'"),
        ("expiry.wake_us", str(INT64_MAX + 1), "1 or more, 9223372036854775807 at most, not '9223372036854775808'"),
        ("expiry.wake_us", "5.0", "not '5.0'"),
        ("rules", "2", "rules takes only 1, not '2'"),
    ],
)
def test_a_value_that_does_not_fit_is_told_the_bounds(name: str, text: str, said: str):
    with pytest.raises(UsageError) as error:
        wanted(settings(), resolve(FLAT, name), text)
    assert said in str(error.value)
    assert error.value.hint


@pytest.mark.parametrize("words", [["a"], ["a", "1", "b"], ["a=1", "b"]])
def test_a_key_without_a_value_is_refused(words: list[str]):
    with pytest.raises(UsageError, match="has no value"):
        pairs(words)


def test_a_value_may_hold_what_parts_a_key():
    assert pairs(["a=b=c"]) == [("a", "b=c")]
    assert pairs(["a", "b=c"]) == [("a", "b=c")]


def test_units_end_no_key_twice():
    assert all(sum(key.endswith(unit.suffix) for unit in UNITS) <= 1 for key in FLAT)
