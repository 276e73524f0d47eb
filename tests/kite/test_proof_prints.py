"""Effect prints on disk: written once, content-addressed, and not believed when they are something else."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kite.engine import Distribution
from kite.errors import KiteError
from kite.proof import Print, PrintDamaged, PrintMissing, PrintUnwritable, kl_nats, recall, record
from kite.proof.prints import FOLDER, position, sides

BASE = Distribution({3: math.log(0.5), 1: math.log(0.25)})
BLEND = Distribution({3: math.log(0.1), 1: math.log(0.6)})
INTEGERS_NATS = 3e-5  # half a millionth in a log-probability, weighed with a rest of at least 1 in 41


def made(distance_micronats: int = 7) -> Print:
    return Print(
        base="tiny",
        version="credit@0123456789ab",
        probes="0" * 64,
        positions=(position(BASE, BLEND),),
        distance_micronats=distance_micronats,
    )


def test_what_is_recorded_is_recalled(tmp_path: Path) -> None:
    reference = record(tmp_path, made())
    assert reference.path == f"{FOLDER}/{reference.digest}.json"
    assert reference.distance_micronats == 7
    assert recall(tmp_path, reference) == made()


def test_equal_prints_are_one_file_that_nobody_writes_to(tmp_path: Path) -> None:
    assert record(tmp_path, made()) == record(tmp_path, made())
    assert record(tmp_path, made()) != record(tmp_path, made(8))
    files = sorted((tmp_path / FOLDER).iterdir())
    assert len(files) == 2
    assert {file.stat().st_mode & 0o777 for file in files} == {0o444}


def test_a_print_that_is_gone_is_named(tmp_path: Path) -> None:
    reference = record(tmp_path, made())
    (tmp_path / reference.path).unlink()
    with pytest.raises(PrintMissing, match=reference.digest) as caught:
        recall(tmp_path, reference)
    assert "adapter root" in caught.value.hint


def test_a_print_that_was_altered_is_not_believed(tmp_path: Path) -> None:
    reference = record(tmp_path, made())
    file = tmp_path / reference.path
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content.replace(b'"tiny"', b'"tony"'))
    with pytest.raises(PrintDamaged, match="digest"):
        recall(tmp_path, reference)


def test_a_reference_that_says_another_distance_is_not_believed(tmp_path: Path) -> None:
    reference = record(tmp_path, made()).model_copy(update={"distance_micronats": 1})
    with pytest.raises(PrintDamaged, match="7, not 1"):
        recall(tmp_path, reference)


def test_a_file_that_never_was_a_print_is_not_believed(tmp_path: Path) -> None:
    """Its digest is right: someone put other bytes into the store under their own name."""
    from hashlib import sha256

    reference = record(tmp_path, made())
    other = tmp_path / FOLDER / "other.json"
    other.write_bytes(b'{"format":1}')
    update = {"path": f"{FOLDER}/other.json", "digest": sha256(b'{"format":1}').hexdigest()}
    with pytest.raises(PrintDamaged, match="required"):
        recall(tmp_path, reference.model_copy(update=update))


def test_a_root_that_is_no_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("in the way")
    with pytest.raises(PrintUnwritable) as caught:
        record(tmp_path, made())
    assert isinstance(caught.value, KiteError)
    assert caught.value.retryable


def test_a_position_has_one_number_for_each_token() -> None:
    with pytest.raises(ValueError, match="one to one"):
        made().positions[0].model_validate({"tokens": [1, 2], "base": [0], "blend": [0, 0]})
    with pytest.raises(KeyError):
        position(BASE, Distribution({3: -1.0}))


@given(st.lists(st.floats(-30, 0), min_size=1, max_size=40), st.lists(st.floats(-30, 0), min_size=40, max_size=40))
def test_integers_lose_a_few_micronats(base: list[float], blend: list[float]) -> None:
    """A thirtieth of what a later proof allows at least."""
    count = len(base)
    one, other = (
        Distribution({token: value - math.log(count + 1) for token, value in enumerate(side[:count])})
        for side in (base, blend)
    )
    assert kl_nats(*sides(position(one, other))) == pytest.approx(kl_nats(one, other), abs=INTEGERS_NATS)
