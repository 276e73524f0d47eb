"""Key files: made once, never replaced, read by their owner only, and never one kind for the other."""

import stat
from pathlib import Path

import pytest

from kite.errors import Fault
from kite.testing.disk import read_only
from kite.trust import (
    KeyFileExists,
    KeyFileMissing,
    KeyFileOpen,
    KeyFileUnreadable,
    KeyFileUnwritable,
    kept_key,
    load_public,
    load_signer,
    new_key,
    public_path,
)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """A private key, with its public half beside it."""
    path = tmp_path / "keys" / "node.key"
    new_key(path)
    return path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_key_comes_back_and_is_its_owner_s_alone(tmp_path: Path):
    path = tmp_path / "keys" / "node.key"
    made = new_key(path)
    assert load_signer(path).seed == made.seed
    assert load_public(tmp_path / "keys" / "node.pub") == made.public
    assert [mode(found) for found in (path.parent, path, public_path(path))] == [0o700, 0o600, 0o644]
    assert made.seed.hex() not in public_path(path).read_text()


def test_the_public_half_lies_beside_whatever_the_key_is_called(tmp_path: Path):
    new_key(tmp_path / "node-1.2")
    new_key(tmp_path / "node-1.3")
    assert {path.name for path in tmp_path.iterdir()} == {"node-1.2", "node-1.2.pub", "node-1.3", "node-1.3.pub"}


def test_no_file_is_ever_replaced(key: Path):
    before = key.read_bytes(), public_path(key).read_bytes()
    with pytest.raises(KeyFileExists, match=r"node\.key exists"):
        new_key(key)
    assert (key.read_bytes(), public_path(key).read_bytes()) == before


def test_a_public_key_in_the_way_leaves_no_half(tmp_path: Path):
    (tmp_path / "node.pub").write_text("another's\n")
    with pytest.raises(KeyFileExists, match=r"node\.pub exists"):
        new_key(tmp_path / "node.key")
    assert [path.name for path in tmp_path.iterdir()] == ["node.pub"]


def test_a_key_that_is_there_is_kept(key: Path):
    public = public_path(key)
    public.unlink()
    kept = kept_key(key)  # as after a power cut between the two files
    assert (kept.seed, load_public(public)) == (load_signer(key).seed, kept.public)
    assert kept_key(key.with_name("other.key")).seed != kept.seed
    assert kept_key(key).seed == kept.seed


def test_a_public_half_of_another_key_is_noticed(key: Path):
    new_key(key.with_name("other.key"))
    public_path(key).write_bytes(public_path(key.with_name("other.key")).read_bytes())
    with pytest.raises(KeyFileUnreadable, match="not the public half"):
        kept_key(key)


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o620, 0o610])
def test_a_private_key_that_others_reach_is_refused(key: Path, bits: int):
    key.chmod(bits)
    with pytest.raises(KeyFileOpen) as caught:
        load_signer(key)
    assert (caught.value.mode, caught.value.hint) == (bits, f"chmod 600 {key}")
    key.chmod(0o400)
    load_signer(key)
    public_path(key).chmod(0o666)
    load_public(public_path(key))


def test_a_private_key_is_not_given_away_for_a_public_one(key: Path):
    with pytest.raises(KeyFileUnreadable, match="holds a `kite-private-key`, not a `kite-public-key`") as caught:
        load_public(key)
    assert key.read_text().split()[1] not in str(caught.value)
    with pytest.raises(KeyFileUnreadable, match="holds a `kite-public-key`"):
        load_signer(public_path(key))


def test_a_key_that_is_not_there(tmp_path: Path):
    with pytest.raises(KeyFileMissing, match=r"no key at .*nowhere\.key") as caught:
        load_signer(tmp_path / "nowhere.key")
    assert caught.value.fault is Fault.USER


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"kite-private-key",
        b"kite-private-key " + b"0" * 62,
        b"kite-private-key " + b"0" * 66,
        b"kite-private-key " + b"g" * 64,
        b"kite-private-key " + b"0" * 64 + b"\nmore",
        b"0" * 64,
        b"\xff" * 80,
        b"-----BEGIN OPENSSH PRIVATE KEY-----\n" * 100,
    ],
)
def test_rubbish_is_said_to_be_no_key(tmp_path: Path, content: bytes):
    path = tmp_path / "rubbish.key"
    path.write_bytes(content)
    path.chmod(0o600)
    for load in (load_signer, load_public):
        with pytest.raises(KeyFileUnreadable, match=r"rubbish\.key is no key"):
            load(path)


def test_a_folder_is_no_key(tmp_path: Path):
    with pytest.raises(KeyFileUnreadable, match="Is a directory"):
        load_signer(tmp_path)


def test_a_place_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(KeyFileUnwritable, match=r"Not a directory|File exists"):
        new_key(tmp_path / "file" / "node.key")
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(KeyFileUnwritable):
        new_key(Path("/proc/node.key"))  # nobody makes files there, root neither


def test_a_read_only_folder(tmp_path: Path):
    with read_only(tmp_path), pytest.raises(KeyFileUnwritable, match="Permission denied"):
        new_key(tmp_path / "node.key")
    assert list(tmp_path.iterdir()) == []
