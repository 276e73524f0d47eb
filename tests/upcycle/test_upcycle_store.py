"""The store: a version is complete or not there, its name is its content, and a crash leaves nothing that matters."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kite.errors import MissingPath, UsageError
from kite.testing import zoo
from kite_upcycle.reader import digest
from kite_upcycle.store import (
    IncompleteVersion,
    Manifest,
    MemberRecord,
    Store,
    StoreDamaged,
    StoreFull,
    served_name,
)

MANIFEST = Manifest(
    members=(MemberRecord(digest="a" * 64, weight_ppm=300_000),),
    method="concatenate",
    rank=4,
    residual_ppm=0,
    parameters=1_000,
    base="b" * 64,
    tool="kite test",
)


def build(folder: Path) -> Manifest:
    zoo.write_adapter(folder)
    return MANIFEST


def leftovers(root: Path) -> list[Path]:
    return list((root / "incoming").iterdir())


def test_a_version_lies_under_its_digest_and_is_readable_by_others(tmp_path: Path) -> None:
    version = Store(tmp_path).put(build)

    assert version.path == tmp_path / "sha256" / version.digest
    assert digest(version.path) == version.digest
    assert {path.name: path.stat().st_mode & 0o777 for path in version.path.iterdir()} == {
        "adapter_config.json": 0o444,
        "adapter_model.safetensors": 0o444,
        "manifest.json": 0o444,
    }
    assert version.path.stat().st_mode & 0o777 == 0o755
    assert (version.path / "manifest.json").read_bytes() == MANIFEST.to_bytes()
    assert leftovers(tmp_path) == []


def test_the_same_version_twice_is_one(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = store.put(build)
    again = Store(tmp_path).put(build)
    assert again == first == store.check(first.digest)
    assert len(list((tmp_path / "sha256").iterdir())) == 1
    assert leftovers(tmp_path) == []


def test_another_manifest_is_another_version(tmp_path: Path) -> None:
    store = Store(tmp_path)
    other = store.put(lambda folder: build(folder).model_copy(update={"rank": 5}))
    assert other.digest != store.put(build).digest


def test_damage_is_found_and_never_returned(tmp_path: Path) -> None:
    store = Store(tmp_path)
    version = store.put(build)
    tensors = version.path / "adapter_model.safetensors"
    raw = bytearray(tensors.read_bytes())
    raw[-1] ^= 1
    tensors.chmod(0o644)
    tensors.write_bytes(raw)

    with pytest.raises(StoreDamaged, match="its content is"):
        store.check(version.digest)
    with pytest.raises(StoreDamaged):
        store.put(build)
    tensors.unlink()
    with pytest.raises(StoreDamaged, match="missing_file"):
        store.check(version.digest)


def test_what_was_never_stored_is_missing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(MissingPath):
        store.check("0" * 64)
    for wrong in ("", "0" * 63, "../" + "0" * 61, "G" * 64):
        with pytest.raises(UsageError):
            store.check(wrong)


def test_a_builder_that_fails_or_forgets_leaves_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)

    def fails(folder: Path) -> Manifest:
        build(folder)
        raise UsageError("no")

    def adds(folder: Path) -> Manifest:
        (folder / "notes.txt").write_text("?")
        return build(folder)

    with pytest.raises(UsageError):
        store.put(fails)
    with pytest.raises(IncompleteVersion, match="notes"):
        store.put(adds)
    with pytest.raises(IncompleteVersion):
        store.put(lambda _: MANIFEST)
    assert leftovers(tmp_path) == list((tmp_path / "sha256").iterdir()) == []


def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    def fills(folder: Path) -> Manifest:
        with Path("/dev/full").open("wb") as file:
            file.write(b"x" * 100_000)
        return build(folder)

    with pytest.raises(StoreFull, match="is full") as caught:
        Store(tmp_path).put(fills)
    assert caught.value.retryable
    assert caught.value.free_bytes > 0
    assert leftovers(tmp_path) == []


HARMS: dict[str, Callable[[Path], None]] = {
    "gone": shutil.rmtree,
    "cut": lambda folder: _cut(folder / "adapter_model.safetensors"),
    "half": lambda folder: (folder / "adapter_config.json").unlink(),
}


def _cut(file: Path) -> None:
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
@pytest.mark.parametrize("exchanges", [True, False], ids=["at once", "one by one"])
def test_a_damaged_version_is_replaced_by_the_same_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Path], None], exchanges: bool
) -> None:
    if not exchanges:  # as on a file system that cannot
        monkeypatch.setattr("kite_upcycle.exchange.RENAME_EXCHANGE", 1 << 30)
    store = Store(tmp_path)
    version = store.put(build)
    harm(version.path)
    assert store.restore(build, lambda _: None) == store.check(version.digest) == version
    assert leftovers(tmp_path) == []


def test_what_is_replaced_is_never_absent_for_whoever_reads_it(tmp_path: Path) -> None:
    """An engine that evicted an adapter reads it again at any moment, and dies when its folder is gone."""
    store = Store(tmp_path)
    version = store.put(build)
    absent, over = list[int](), threading.Event()

    def read() -> None:
        while not over.is_set():
            if not version.path.is_dir():
                absent.append(1)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(20):
            _cut(version.path / "adapter_model.safetensors")
            store.restore(build, lambda _: None)
    finally:
        over.set()
        reader.join()
    assert absent == []


SMALL_DISK = 'mount -t tmpfs -o size=1m,nr_inodes=100 small "$0" && exec "$@"'
ON_FULL_DISK = """
    import sys
    from pathlib import Path
    from kite.testing import zoo
    from kite_upcycle.store import Manifest, Store, StoreFull

    root = Path(sys.argv[1])

    def build(folder):
        zoo.write_adapter(folder)
        return Manifest.model_validate_json(sys.argv[2])

    version = Store(root).put(build)
    size = version.size_bytes
    try:
        for number in range(1_000):
            (root / str(number)).touch()
    except OSError as error:
        print(error.strerror)
    try:
        Store(root).put(build)
    except StoreFull as error:
        print(error.code)
    print(Store(root).delete(version.digest) == size, [*version.path.parent.iterdir(), *(root / "incoming").iterdir()])
"""


def on_small_disk(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    mounted = ["unshare", "--map-root-user", "--mount", "sh", "-c", SMALL_DISK, str(folder), *command]
    return subprocess.run(mounted, check=False, capture_output=True, text=True)


def may_mount() -> bool:
    return shutil.which("unshare") is not None and on_small_disk(Path("/tmp"), "true").returncode == 0  # noqa: S108


@pytest.mark.skipif(not may_mount(), reason="a small disk needs a mount namespace, which is forbidden here")
def test_on_a_disk_without_room_for_a_single_name_a_version_can_still_be_deleted(tmp_path: Path) -> None:
    script = textwrap.dedent(ON_FULL_DISK)
    done = on_small_disk(tmp_path, sys.executable, "-c", script, str(tmp_path), MANIFEST.to_bytes().decode())
    assert done.stdout.splitlines() == ["No space left on device", "store_full", "True []"], done.stderr


BUILDER = """
    import sys
    from pathlib import Path
    from kite_upcycle.store import Store

    def build(folder):
        (folder / "adapter_config.json").write_text("half")
        print("building", flush=True)
        sys.stdin.read()

    Store(Path(sys.argv[1])).put(build)
"""


def test_a_crash_in_mid_build_is_swept_at_the_next_start_but_a_living_builder_is_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(BUILDER), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as builder:
        assert builder.stdout is not None
        assert builder.stdout.readline() == b"building\n"

        Store(tmp_path)
        assert len(leftovers(tmp_path)) == 1, "the builder is alive"

        os.kill(builder.pid, signal.SIGKILL)
        builder.wait(timeout=30)
        assert len(leftovers(tmp_path)) == 1, "nobody cleaned up"

    store = Store(tmp_path)
    assert leftovers(tmp_path) == []
    assert list((tmp_path / "sha256").iterdir()) == []
    assert store.put(build).path.is_dir()


def test_a_manifest_is_strict_and_its_bytes_do_not_vary() -> None:
    assert Manifest.model_validate_json(MANIFEST.to_bytes()) == MANIFEST
    assert MANIFEST.to_bytes() == MANIFEST.model_copy().to_bytes()
    for wrong in ({"method": "ties"}, {"members": ()}, {"base": "x"}, {"surprise": 1}):
        with pytest.raises(ValueError, match="validation error"):
            Manifest.model_validate(MANIFEST.model_dump() | wrong)


def test_a_served_name_carries_the_version() -> None:
    assert served_name("credit-eu", "0123456789abcdef" * 4) == "credit-eu@0123456789ab"
    for blend, address in (("-credit", "a" * 64), ("a@b", "a" * 64), ("", "a" * 64), ("ok", "a" * 12)):
        with pytest.raises(UsageError):
            served_name(blend, address)
