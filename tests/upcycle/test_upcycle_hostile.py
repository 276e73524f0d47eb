"""Files made to harm the reader: each is refused by name, nothing is read beyond a bound, nothing outside the root."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from kite_upcycle import zoo
from kite_upcycle.base import Base
from kite_upcycle.header import LENGTH_BYTES, MAX_HEADER_BYTES
from kite_upcycle.reader import CONFIG_NAME, MAX_CONFIG_BYTES, MAX_TENSORS_BYTES, TENSORS_NAME, digest, read
from kite_upcycle.verify import Limits, verify
from kite_upcycle.violations import Code, UnreadableAdapter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return zoo.write_adapter(tmp_path / "root" / "adapter")


def refusal(path: Path, root: Path | None = None) -> set[str]:
    with pytest.raises(UnreadableAdapter) as caught:
        read(path, root=root)
    return {found.code for found in caught.value.violations}


def split(folder: Path) -> tuple[dict[str, dict[str, object]], bytes]:
    raw = (folder / TENSORS_NAME).read_bytes()
    length = int.from_bytes(raw[:LENGTH_BYTES], "little")
    return json.loads(raw[LENGTH_BYTES : LENGTH_BYTES + length]), raw[LENGTH_BYTES + length :]


def join(folder: Path, header: bytes, data: bytes) -> None:
    (folder / TENSORS_NAME).write_bytes(len(header).to_bytes(LENGTH_BYTES, "little") + header + data)


def edit_header(folder: Path, change: Callable[[dict[str, dict[str, object]]], object]) -> None:
    header, data = split(folder)
    change(header)
    join(folder, json.dumps(header).encode(), data)


def test_a_sound_adapter_is_read_whole(folder: Path) -> None:
    with read(folder) as adapter:
        assert adapter.config["r"] == 4
        assert adapter.digest == digest(folder)
        assert adapter.tensors.load(zoo.FIRST).shape == (4, zoo.TINY.hidden)


def test_a_digest_follows_every_byte_and_the_name_it_belongs_to(folder: Path) -> None:
    before = digest(folder)
    (folder / "README.md").write_text("not part of it")
    assert digest(folder) == before
    for name in (CONFIG_NAME, TENSORS_NAME):
        raw = (folder / name).read_bytes()
        (folder / name).write_bytes(raw + b" ")
        assert digest(folder) != before
        (folder / name).write_bytes(raw)
    assert digest(folder) == before


CONFIGS = {
    "duplicate keys": b'{"r": 4, "r": 64}',
    "duplicate keys within": b'{"rank_pattern": {"q": 1, "q": 2}}',
    "not a number": b'{"lora_alpha": NaN}',
    "infinity": b'{"lora_alpha": -Infinity}',
    "too large a number": b'{"lora_alpha": 1e999}',
    "not UTF-8": '{"r": "é"}'.encode("latin-1"),
    "UTF-16": '{"r": 4}'.encode("utf-16"),
    "a list": b"[]",
    "nothing": b"",
    "a depth bomb": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "digits without end": b'{"r": ' + b"9" * 10_000 + b"}",
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_that_two_parsers_could_read_differently_is_refused(name: str, folder: Path) -> None:
    (folder / CONFIG_NAME).write_bytes(CONFIGS[name])
    assert refusal(folder) == {Code.CONFIG_JSON}


def test_a_configuration_is_bounded(folder: Path) -> None:
    (folder / CONFIG_NAME).write_bytes(b" " * (MAX_CONFIG_BYTES + 1))
    assert refusal(folder) == {Code.FILE_SIZE}


def test_a_tensor_file_is_bounded_before_it_is_read(folder: Path) -> None:
    os.truncate(folder / TENSORS_NAME, MAX_TENSORS_BYTES + 1)  # sparse: it takes no space
    assert refusal(folder) == {Code.FILE_SIZE}


@pytest.mark.parametrize("length", [0, 2**63, 2**64 - 1, MAX_HEADER_BYTES + 1, 10_000_000])
def test_a_header_length_that_cannot_be_is_refused_before_anything_is_allocated(length: int, folder: Path) -> None:
    raw = (folder / TENSORS_NAME).read_bytes()
    (folder / TENSORS_NAME).write_bytes(length.to_bytes(LENGTH_BYTES, "little") + raw[LENGTH_BYTES:])
    assert refusal(folder) == {Code.HEADER_SIZE}


@pytest.mark.parametrize("size", [0, 1, 7, 8])
def test_a_stump_of_a_file_is_refused(size: int, folder: Path) -> None:
    os.truncate(folder / TENSORS_NAME, size)
    assert refusal(folder) == {Code.HEADER_SIZE}


def test_a_pickle_is_refused_under_every_name(folder: Path) -> None:
    pickled = pickle.dumps({"base_model.model.x.lora_A.weight": [0.0] * 100})
    (folder / TENSORS_NAME).write_bytes(pickled)
    assert refusal(folder) == {Code.HEADER_SIZE}
    (folder / TENSORS_NAME).unlink()
    (folder / "adapter_model.bin").write_bytes(pickled)
    assert refusal(folder) == {Code.PICKLE_FILE}
    zoo.write_adapter(folder)
    assert refusal(folder) == {Code.PICKLE_FILE}  # which of the two would be loaded is not ours to guess


def test_added_embeddings_beside_the_adapter_are_refused(folder: Path) -> None:
    (folder / "new_embeddings.safetensors").write_bytes(b"")
    assert refusal(folder) == {Code.VOCABULARY}


def test_data_that_is_too_short_or_too_long_is_refused(folder: Path) -> None:
    raw = (folder / TENSORS_NAME).read_bytes()
    for wrong in (raw[:-1], raw[:-1000], raw + b"\0"):
        (folder / TENSORS_NAME).write_bytes(wrong)
        assert refusal(folder) == {Code.DATA_SIZE}


def test_overlapping_tensors_and_gaps_are_refused(folder: Path) -> None:
    header, data = split(folder)
    names = [name for name in header if name != "__metadata__"]
    twins = [name for name in names if header[name]["shape"] == header[zoo.FIRST]["shape"]]
    shared = {**header, twins[1]: header[twins[0]]}
    join(folder, json.dumps(shared).encode(), data)
    assert Code.TENSOR_OVERLAP in refusal(folder)

    join(folder, json.dumps({name: header[name] for name in names if name != twins[1]}).encode(), data)
    assert refusal(folder) <= {Code.TENSOR_GAP, Code.DATA_SIZE}


ENTRIES: dict[str, dict[str, object]] = {
    "offsets backwards": {"data_offsets": [64, 0]},
    "offsets before the file": {"data_offsets": [-256, 0]},
    "offsets of another length": {"data_offsets": [0, 2]},
    "a shape that overflows": {"shape": [2**40, 2**40]},
    "a negative shape": {"shape": [-4, -32]},
    "a shape of text": {"shape": ["4", 32]},
    "a shape of truth": {"shape": [True, 128]},
    "too many dimensions": {"shape": [1] * 7 + [4, 32]},
    "one offset": {"data_offsets": [0]},
    "no type": {"dtype": None},
    "a stowaway field": {"link": "/etc/passwd"},
}


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_that_does_not_add_up_is_refused(name: str, folder: Path) -> None:
    edit_header(folder, lambda header: header[zoo.FIRST].update(ENTRIES[name]))
    assert refusal(folder) == {Code.TENSOR_ENTRY}


@pytest.mark.parametrize("bad", ["../../etc/passwd", "a/b", "", "x" * 300, "q\u202eproj", "a\nb"])
def test_tensor_names_go_by_pattern_and_are_quoted_safely(bad: str, folder: Path) -> None:
    edit_header(folder, lambda header: header.update({bad: header.pop(zoo.FIRST)}))
    with pytest.raises(UnreadableAdapter) as caught:
        read(folder)
    (found,) = caught.value.violations
    assert found.code == Code.TENSOR_ENTRY
    assert found.where.isprintable()
    assert len(found.where) <= 160


def test_headers_with_duplicate_names_or_without_end_are_refused(folder: Path) -> None:
    _, data = split(folder)
    for header in (b'{"a": {}, "a": {}}', b"{", b'["a"]', b"\xff\xfe{}", b"[" * 100_000):
        join(folder, header, data)
        assert refusal(folder) == {Code.HEADER_JSON}


def test_the_number_of_tensors_is_bounded(folder: Path) -> None:
    many: dict[str, dict[str, object]] = {f"t{number}": {} for number in range(65_537)}
    join(folder, json.dumps(many).encode(), b"")
    assert refusal(folder) == {Code.TENSOR_COUNT}


def test_symlinks_are_refused_at_every_level(folder: Path, tmp_path: Path) -> None:
    root = folder.parent
    (root / "alias").symlink_to(folder)
    assert refusal(Path("alias"), root) == refusal(root / "alias") == {Code.SYMLINK}
    (root / "group").symlink_to(tmp_path)
    assert refusal(Path("group/root/adapter"), root) == {Code.SYMLINK}
    for name in (CONFIG_NAME, TENSORS_NAME):
        moved = (folder / name).rename(tmp_path / name)
        (folder / name).symlink_to(moved)
        assert refusal(folder, root) == {Code.SYMLINK}
        (folder / name).unlink()
        moved.rename(folder / name)


def test_the_root_may_be_a_symlink_of_the_operator(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mount").symlink_to(folder.parent)
    for path in (Path("adapter"), tmp_path / "mount" / "adapter", folder):
        with read(path, root=tmp_path / "mount") as adapter:
            assert adapter.config["r"] == 4


@pytest.mark.parametrize("path", ["../secret", "/etc", "adapter/../../secret", "a/../../../etc"])
def test_nothing_outside_the_root_is_touched(path: str, folder: Path) -> None:
    zoo.write_adapter(folder.parent.parent / "secret")
    assert refusal(Path(path), folder.parent) == {Code.OUTSIDE_ROOT}


@pytest.mark.parametrize("path", [".hidden", "a b", "x\ny", "a\0b", "-rf", "n" * 200])
def test_folder_names_go_by_pattern(path: str, folder: Path) -> None:
    assert refusal(Path(path), folder.parent) == {Code.PATH_NAME}


def test_what_is_not_there_or_not_a_file_is_said(folder: Path) -> None:
    assert refusal(folder.parent / "nowhere") == {Code.MISSING_FILE}
    assert refusal(Path("\0")) == {Code.MISSING_FILE}
    assert refusal(folder / CONFIG_NAME) == {Code.NOT_A_FILE}
    (folder / TENSORS_NAME).unlink()
    assert refusal(folder) == {Code.MISSING_FILE}
    os.mkfifo(folder / TENSORS_NAME)  # opening it must not wait for a writer
    assert refusal(folder) == {Code.NOT_A_FILE}
    (folder / TENSORS_NAME).unlink()
    (folder / TENSORS_NAME).mkdir()
    assert refusal(folder) == {Code.NOT_A_FILE}


def test_verify_reports_hostile_files_instead_of_raising(folder: Path, tmp_path: Path) -> None:
    base = Base.load(zoo.write_base(tmp_path / "base"))
    limits = Limits(16, 1_000_000)
    (folder / CONFIG_NAME).write_bytes(b'{"r": 4, "r": 4}')
    os.truncate(folder / TENSORS_NAME, 600)
    report = verify(Path("adapter"), base, limits, root=folder.parent)
    assert {found.code for found in report.violations} == {Code.CONFIG_JSON, Code.HEADER_SIZE}
    assert {found.code for found in verify(Path("../x"), base, limits, root=folder.parent).violations} >= {
        Code.OUTSIDE_ROOT
    }


def test_no_descriptor_is_left_open(folder: Path) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - pathlib keeps its own descriptor open meanwhile

    before = count()
    with read(folder):
        pass
    digest(folder)
    (folder / CONFIG_NAME).write_bytes(b"[")
    refusal(folder)
    refusal(folder.parent / "nowhere")
    assert count() == before
