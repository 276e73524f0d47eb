"""The three exact fields: compared with the stamp to the last bit, named when they differ, required when strict."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kite.testing.zoo.samples import TINY, Shape, write_adapter, write_base
from kite_upcycle import stamp
from kite_upcycle.base import Base
from kite_upcycle.imprint import imprint
from kite_upcycle.layout import Serving
from kite_upcycle.rewrite import rewrite
from kite_upcycle.stamp import Demand
from kite_upcycle.testing import older
from kite_upcycle.verify import Limits, Report, verify
from kite_upcycle.violations import Code

WIDE = Limits(max_lora_rank=16, params_share_max_ppm=1_000_000)
STRICT = Demand(strict=True)
GGUF_EPS = 9.999999747378752e-06  # 1e-05 as float32, which is what a GGUF file keeps of it

Make = Callable[..., Base]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Make a base: `make("tiny", rope_theta=1e6)`; None leaves a field out."""

    def made(name: str, shape: Shape = TINY, **config: object) -> Base:
        folder = write_base(tmp_path / name, shape)
        fields = json.loads((folder / "config.json").read_text()) | config
        known = {field: value for field, value in fields.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(known))
        return Base.load(folder)

    return made


def trained(path: Path, base: Base, serving: Serving | None = None, shape: Shape = TINY) -> Path:
    folder = write_adapter(path, shape)
    assert imprint(folder, base, serving or Serving()).outcome == "stamped"
    return folder


def said(report: Report) -> dict[str, str]:
    return {found.code: str(found) for found in report.violations}


def test_an_adapter_on_its_own_base_keeps_the_strict_contract(make: Make, tmp_path: Path) -> None:
    base = make("tiny")
    report = verify(trained(tmp_path / "a", base), base, WIDE, demand=STRICT)
    assert report.accepted, said(report)
    assert report.stamp == stamp.of(base, Serving())
    (note,) = report.notes
    assert note.startswith("nothing told how the servers hold the KV cache; taken as the defaults")
    assert note.endswith("kv_dtype auto, block_size 32, kv_layout NHD, tp 1, pp 1")


def test_without_a_stamp_strict_refuses_and_others_are_told(make: Make, tmp_path: Path) -> None:
    base, adapter = make("tiny"), write_adapter(tmp_path / "plain")
    assert set(said(verify(adapter, base, WIDE, demand=STRICT))) == {Code.STAMP_MISSING}
    report = verify(adapter, base, WIDE)
    assert report.accepted
    assert report.notes == (stamp.NO_STAMP,)


def test_the_real_case_of_an_epsilon_that_went_through_float32(make: Make, tmp_path: Path) -> None:
    adapter = trained(tmp_path / "a", make("from_gguf", rms_norm_eps=GGUF_EPS))

    report = verify(adapter, make("original"), WIDE)

    assert said(report) == {
        Code.NORM_EPS: "norm_eps at rms_norm_eps: expected 1e-05 (rms_norm_eps),"
        " found 9.999999747378752e-06 (rms_norm_eps)"
    }
    assert set(said(verify(adapter, make("original"), WIDE, demand=STRICT))) == {Code.NORM_EPS, Code.BASE_IDENTITY}


def test_an_epsilon_under_another_alias_is_the_same_number(make: Make, tmp_path: Path) -> None:
    adapter = trained(tmp_path / "a", make("one"))
    other = make("other", rms_norm_eps=None, layer_norm_epsilon=1e-5)
    assert other.geometry.norm_eps_field == "layer_norm_epsilon"
    assert verify(adapter, other, WIDE).accepted
    moved = make("moved", rms_norm_eps=None, layer_norm_epsilon=1e-5 + 1e-8)
    assert "layer_norm_epsilon" in said(verify(adapter, moved, WIDE))[Code.NORM_EPS]


@pytest.mark.parametrize("theta", [10_000, 10_000.0])
def test_an_integer_rotary_base_is_the_same_as_its_float(theta: float, make: Make, tmp_path: Path) -> None:
    adapter = trained(tmp_path / "a", make("float", rope_theta=10_000.0))
    assert verify(adapter, make("same", rope_theta=theta), WIDE).accepted


def test_a_rotary_base_that_differs_is_named_in_both_checks(make: Make, tmp_path: Path) -> None:
    adapter = trained(tmp_path / "a", make("tiny"))
    found = said(verify(adapter, make("other", rope_theta=10_000.0001), WIDE))
    assert found[Code.ROPE_THETA] == "rope_theta at rope_theta of full layers: expected 10000.0001, found 10000.0"
    assert "kind_0.rope_theta: 10000.0 != 10000.0001" in found[Code.KV_CACHE_LAYOUT_HASH]
    assert set(found) == {Code.ROPE_THETA, Code.KV_CACHE_LAYOUT_HASH}


def test_a_default_is_said_to_be_one(make: Make, tmp_path: Path) -> None:
    adapter = trained(tmp_path / "a", make("tiny", rope_theta=500_000.0))
    found = said(verify(adapter, make("silent", rope_theta=None), WIDE))
    assert "expected 10000.0 (a default: config.json has none), found 500000.0" in found[Code.ROPE_THETA]
    silent = trained(tmp_path / "b", make("silent_too", rope_theta=None))
    found = said(verify(silent, make("loud", rope_theta=500_000.0), WIDE))
    assert "found 10000.0 (a default: config.json has none)" in found[Code.ROPE_THETA]


def test_the_hash_names_the_fields_that_differ(make: Make, tmp_path: Path) -> None:
    deep = make("deep", Shape(layers=4), rms_norm_eps=1e-5)
    adapter = trained(tmp_path / "a", deep, shape=Shape(layers=4))
    found = said(verify(adapter, make("shallow"), WIDE))
    assert "(layers: 4 != 2, kind_of_layers: 0,0,0,0 != 0,0)" in found[Code.KV_CACHE_LAYOUT_HASH]
    assert Code.LAYER_RANGE in found


def test_an_attention_mismatch_names_its_layer(make: Make, tmp_path: Path) -> None:
    base = make("narrow", Shape(layers=13, hidden=112, heads=28, kv_heads=14))
    adapter = write_adapter(tmp_path / "a", Shape(layers=13, hidden=128, heads=32, kv_heads=14), targets=["q_proj"])
    texts = [str(found) for found in verify(adapter, base, WIDE).violations]
    assert "KV cache alignment mismatch at layer 12: adapter 32 heads, base 28" in texts


def test_servers_count_as_far_as_they_are_known(make: Make, tmp_path: Path) -> None:
    base = make("tiny")
    adapter = trained(tmp_path / "a", base, Serving(block_size=16, tp=2))

    assert verify(adapter, base, WIDE).accepted
    assert verify(adapter, base, WIDE, demand=Demand(told={"block_size": 16})).accepted
    assert (
        "block_size: 16 != 64"
        in said(verify(adapter, base, WIDE, demand=Demand(told={"block_size": 64})))[Code.KV_CACHE_LAYOUT_HASH]
    )
    strictly = said(verify(adapter, base, WIDE, demand=STRICT))
    assert "(block_size: 16 != 32, tp: 2 != 1)" in strictly[Code.KV_CACHE_LAYOUT_HASH]
    assert verify(adapter, base, WIDE, demand=Demand(strict=True, told={"block_size": 16, "tp": 2})).accepted


def test_another_base_of_the_same_shape_is_found_when_strict(make: Make, tmp_path: Path) -> None:
    base = make("tiny")
    adapter = trained(tmp_path / "a", base)
    other = Base.load(write_base(tmp_path / "other", seed=5))
    assert verify(adapter, other, WIDE).accepted
    assert set(said(verify(adapter, other, WIDE, demand=STRICT))) == {Code.BASE_IDENTITY}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(
            (stamp.NORM_EPS, text)
            for text in ("true", '"1e-05"', "NaN", "Infinity", "0", "-1e-05", "1e999", "", "1e-5x")
        ),
        *((stamp.ROPE_THETA, f'{{"full":{text}}}') for text in ("true", '"10000"', "NaN", "-1", "[1]", "1" * 400)),
        (stamp.ROPE_THETA, '{"full":1,"full":2}'),
        (stamp.ROPE_THETA, "10000.0"),
        (stamp.ROPE_DEFAULTED, "[1]"),
        (stamp.LAYOUT_HASH, "0123"),
        (stamp.LAYOUT, '{"layers":[4]}'),
        (stamp.LAYOUT, "[]"),
        (stamp.BASE, "tiny"),
    ],
)
def test_a_stamp_that_is_no_stamp_is_a_violation(name: str, text: str, make: Make, tmp_path: Path) -> None:
    base = make("tiny")
    adapter = trained(tmp_path / "a", base)
    rewrite(adapter, lambda found: {**found, name: text})
    for demand in (STRICT, Demand()):
        violations = verify(adapter, base, WIDE, demand=demand).violations
        assert [(found.code, found.where) for found in violations] == [(Code.STAMP_FIELD, name)]


def test_a_record_that_its_hash_does_not_fit_is_a_violation(make: Make, tmp_path: Path) -> None:
    base = make("tiny")
    adapter = trained(tmp_path / "a", base)
    rewrite(adapter, lambda found: {**found, stamp.LAYOUT: found[stamp.LAYOUT].replace('"layers":2', '"layers":3')})
    assert set(said(verify(adapter, base, WIDE))) == {Code.STAMP_FIELD}


def test_every_key_of_a_stamp_is_needed(make: Make) -> None:
    base = make("tiny")
    whole = stamp.of(base, Serving()).metadata()
    for name in whole:
        verdict = stamp.check({key: text for key, text in whole.items() if key != name}, base, STRICT)
        assert [found.where for found in verdict.violations] == [name]
    several = stamp.check({stamp.VERSION: "2"}, base, STRICT)
    assert len(several.violations) == len(whole) - 1


def test_a_stamp_of_version_1_is_compared_and_refused_only_when_strict(make: Make, tmp_path: Path) -> None:
    base = make("tiny")
    adapter = trained(tmp_path / "a", base)
    rewrite(adapter, older)
    report = verify(adapter, base, WIDE)
    assert report.accepted
    assert "version 1" in report.notes[0]
    assert set(said(verify(adapter, base, WIDE, demand=STRICT))) == {Code.STAMP_VERSION}
    assert Code.KV_CACHE_LAYOUT_HASH in said(verify(adapter, make("other", rope_theta=10_000.5), WIDE))


@pytest.mark.parametrize("version", ["3", "0", "two", "2.0", "-1"])
def test_a_version_that_is_not_known_is_a_violation(version: str, make: Make, tmp_path: Path) -> None:
    base = make("tiny")
    adapter = trained(tmp_path / "a", base)
    rewrite(adapter, lambda found: {**found, stamp.VERSION: version})
    assert set(said(verify(adapter, base, WIDE))) == {Code.STAMP_VERSION}


def test_a_family_that_is_not_known_is_said(make: Make, tmp_path: Path) -> None:
    base = make("odd", model_type="homegrown")
    report = verify(trained(tmp_path / "a", base), base, WIDE)
    assert report.accepted
    assert "homegrown" in report.notes[0]
