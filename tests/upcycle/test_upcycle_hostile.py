"""Files made to harm the reader: each is refused by name, nothing is read beyond a bound, nothing outside the root."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kite.testing import zoo
from kite.testing.zoo import hostile
from kite_upcycle import lora, reader, verify
from kite_upcycle.base import Base
from kite_upcycle.header import LENGTH_BYTES, MAX_HEADER_BYTES, MAX_TENSORS, parse
from kite_upcycle.reader import CONFIG_NAME, MAX_CONFIG_BYTES, MAX_TENSORS_BYTES, TENSORS_NAME, digest, examine, read
from kite_upcycle.verify import Limits
from kite_upcycle.violations import Code, UnreadableAdapter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return zoo.write_adapter(tmp_path / "root" / "adapter")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base.load(zoo.write_base(tmp_path_factory.mktemp("bases") / "tiny"))


def refusal(path: Path, root: Path | None = None) -> set[str]:
    with pytest.raises(UnreadableAdapter) as caught:
        read(path, root=root)
    return {found.code for found in caught.value.violations}


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - pathlib keeps its own descriptor open meanwhile


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


@pytest.mark.parametrize("name", zoo.HOSTILE)
def test_a_hostile_file_is_refused_before_anything_is_loaded(name: str, folder: Path) -> None:
    shown = zoo.HOSTILE[name].spoil(folder)
    before = descriptors()
    assert refusal(shown, folder.parent) == zoo.HOSTILE[name].codes
    assert descriptors() == before


def test_files_are_bounded_to_the_byte(folder: Path) -> None:
    config = (folder / CONFIG_NAME).read_bytes()
    for length, expected in ((MAX_CONFIG_BYTES, set[str]()), (MAX_CONFIG_BYTES + 1, {Code.FILE_SIZE})):
        (folder / CONFIG_NAME).write_bytes(config.ljust(length))
        with examine(folder) as findings:
            assert {found.code for found in findings.violations} == expected
    (folder / CONFIG_NAME).write_bytes(config)
    os.truncate(folder / TENSORS_NAME, MAX_TENSORS_BYTES + 1)  # sparse: it takes no space
    assert refusal(folder) == {Code.FILE_SIZE}


@pytest.mark.parametrize("length", [2**63 - 1, 2**64 - 1, MAX_HEADER_BYTES + 1])
def test_a_header_length_that_cannot_be_is_refused_before_anything_is_allocated(length: int, folder: Path) -> None:
    os.truncate(folder / TENSORS_NAME, MAX_HEADER_BYTES * 2)
    with (folder / TENSORS_NAME).open("r+b") as file:
        file.write(length.to_bytes(LENGTH_BYTES, "little"))
    assert refusal(folder) == {Code.HEADER_SIZE}


def test_a_file_cut_at_any_boundary_is_refused(folder: Path) -> None:
    raw = (folder / TENSORS_NAME).read_bytes()
    header, data = hostile.split(folder)
    start = len(raw) - len(data)
    places = {start + offset for name in header for offset in hostile.offsets(header, name)}
    for place in sorted({*range(LENGTH_BYTES + 2), start, *places}):
        for size in (place - 1, place, place + 1):
            if 0 <= size < len(raw):
                (folder / TENSORS_NAME).write_bytes(raw[:size])
                assert refusal(folder) == {Code.HEADER_SIZE if size < start else Code.DATA_SIZE}, size


def test_two_tensors_cannot_share_all_their_bytes(folder: Path) -> None:
    header, data = hostile.split(folder)
    names = [name for name in header if name != hostile.METADATA]
    twins = [name for name in names if hostile.entry(header, name)["shape"] == [4, zoo.TINY.hidden]]
    hostile.join(folder, json.dumps({**header, twins[1]: header[twins[0]]}).encode(), data)
    assert Code.TENSOR_OVERLAP in refusal(folder)

    hostile.join(folder, json.dumps({name: header[name] for name in names if name != twins[1]}).encode(), data)
    assert refusal(folder) <= {Code.TENSOR_GAP, Code.DATA_SIZE}


@pytest.mark.parametrize("bad", ["../../etc/passwd", "a/b", "", "x" * 300, "q\u202eproj", "a\nb", "\x1b[31m"])
def test_tensor_names_go_by_pattern_and_are_quoted_safely(bad: str, folder: Path) -> None:
    hostile.edit_header(folder, lambda header: header.update({bad: header.pop(zoo.FIRST)}))
    with pytest.raises(UnreadableAdapter) as caught:
        read(folder)
    (found,) = caught.value.violations
    assert found.code == Code.TENSOR_ENTRY
    assert found.where.isprintable()
    assert len(found.where) <= 160


def test_the_number_of_tensors_is_bounded_exactly() -> None:
    matrix = '{"dtype":"F32","shape":[0,8],"data_offsets":[0,0]}'
    entries = [f'"t{number}":{matrix}' for number in range(MAX_TENSORS + 1)]

    most, sound = parse(f"{{{','.join(entries[1:])}}}".encode(), 0)
    assert most is not None
    assert (len(most.entries), sound) == (MAX_TENSORS, [])
    none, (found,) = parse(f"{{{','.join(entries)}}}".encode(), 0)
    assert (none, found.code) == (None, Code.TENSOR_COUNT)


@pytest.mark.parametrize("depth", [*range(20, 400, 45), *range(900, 1_000, 9), 2_000, 200_000])
def test_nesting_never_raises_wherever_the_parser_gives_up(depth: int, folder: Path, base: Base) -> None:
    nest = b"[" * depth + b"]" * depth
    for config in (b'{"r": %s}' % nest, b'{"rank_pattern": %s, "loftq_config": %s}' % (nest, nest)):
        (folder / CONFIG_NAME).write_bytes(config)
        for header in (b'{"t": %s}', b'{"t": {"dtype": %s}}', b'{"__metadata__": {"a": %s}}'):
            hostile.join(folder, header % nest, b"")
            assert not verify.verify(folder, base, Limits(16, 10**6)).accepted


def test_symlinks_are_refused_at_every_level(folder: Path, tmp_path: Path) -> None:
    root = folder.parent
    (root / "alias").symlink_to(folder)
    assert refusal(Path("alias"), root) == refusal(root / "alias") == {Code.SYMLINK}
    (root / "group").symlink_to(tmp_path)
    assert refusal(Path("group/root/adapter"), root) == {Code.SYMLINK}


def test_the_root_may_be_a_symlink_of_the_operator(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mount").symlink_to(folder.parent)
    for path in (Path("adapter"), tmp_path / "mount" / "adapter", folder):
        with read(path, root=tmp_path / "mount") as adapter:
            assert adapter.config["r"] == 4


@pytest.mark.parametrize("path", ["../secret", "/etc", "adapter/../../secret", "a/../../../etc"])
def test_nothing_outside_the_root_is_touched(path: str, folder: Path) -> None:
    zoo.write_adapter(folder.parent.parent / "secret")
    assert refusal(Path(path), folder.parent) == {Code.OUTSIDE_ROOT}


@pytest.mark.parametrize("path", ["a\0b", "n" * 200, "é", "a;b", "$HOME", "~"])
def test_folder_names_go_by_pattern(path: str, folder: Path) -> None:
    assert refusal(Path(path), folder.parent) == {Code.PATH_NAME}


def test_a_path_that_no_system_takes_is_missing() -> None:
    assert refusal(Path("\0")) == {Code.MISSING_FILE}


def test_verify_reports_hostile_files_instead_of_raising(folder: Path, base: Base) -> None:
    limits = Limits(16, 1_000_000)
    (folder / CONFIG_NAME).write_bytes(b'{"r": 4, "r": 4}')
    os.truncate(folder / TENSORS_NAME, 600)
    report = verify.verify(Path("adapter"), base, limits, root=folder.parent)
    assert {found.code for found in report.violations} == {Code.CONFIG_JSON, Code.HEADER_SIZE}


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def shrink(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 600)


def rewrite(path: Path) -> None:
    """Write other bytes of the same length; again, until the kernel's clock has ticked."""
    before, raw = path.stat(), path.read_bytes()
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        path.write_bytes(raw[:-4] + b"\1\1\1\1")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # whoever does it on purpose hides it


@pytest.mark.parametrize("change", [grow, shrink, rewrite])
def test_tensors_that_change_while_they_are_read_are_refused(
    change: Callable[[Path], None], folder: Path, base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    def examine_slowly(path: Path, *, root: Path | None = None) -> reader.Findings:
        findings = examine(path, root=root)
        change(path / TENSORS_NAME)
        return findings

    monkeypatch.setattr(verify, "examine", examine_slowly)
    report = verify.verify(folder, base, Limits(16, 10**6))
    assert {found.code for found in report.violations} == {Code.FILE_CHANGED}


@pytest.mark.parametrize("name", [CONFIG_NAME, TENSORS_NAME])
@pytest.mark.parametrize("change", [grow, rewrite])
def test_a_file_that_changes_while_it_is_hashed_is_refused(
    change: Callable[[Path], None], name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = reader.files.frame

    def frame_slowly(files: object) -> str:
        found = frame(files)  # pyright: ignore[reportArgumentType] - handed on as it came
        change(folder / name)
        return found

    monkeypatch.setattr(reader.files, "frame", frame_slowly)
    assert Code.FILE_CHANGED in refusal(folder)


def test_a_tensor_that_has_become_shorter_is_not_loaded(folder: Path) -> None:
    with read(folder) as adapter:
        os.truncate(folder / TENSORS_NAME, 700)
        with pytest.raises(EOFError, match="shorter"):
            adapter.tensors.load(zoo.FIRST)


def test_no_descriptor_is_left_open(folder: Path) -> None:
    before = descriptors()
    with read(folder):
        pass
    digest(folder)
    (folder / CONFIG_NAME).write_bytes(b"[")
    refusal(folder)
    refusal(folder.parent / "nowhere")
    assert descriptors() == before


# ------------------------------------------------------------------------------------------------- time and memory

# Runs in a process of its own; what it prints are codes. It may use 200 MiB above what Python and the modules take.
READ = """
import resource, sys
from pathlib import Path
from kite_upcycle import lora, reader
def address_space():
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
limit = address_space() + 200 * 1024**2
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for name in sys.argv[1:]:
    with reader.examine(Path(name)) as findings:
        settings, wrong = (None, []) if findings.config is None else lora.parse(findings.config)
        if settings is not None and findings.tensors is not None:
            for key in findings.tensors.entries:
                settings.aims_at(key), settings.rank_of(key), settings.alpha_of(key)
        print(*{found.code for found in (*findings.violations, *wrong)} or {"sound"})
"""
DEADLINE_S = 60.0  # twenty times what it takes: whatever hangs is killed, nothing is measured


def fill(piece: bytes) -> bytes:
    """Return a header of the largest size with as many pieces as fit."""
    return b'{"t":[' + piece * ((MAX_HEADER_BYTES - 10) // len(piece)) + b"0]}"


def names(count: int) -> bytes:
    return b"{" + b",".join(b'"%x":0' % number for number in range(count)) + b"}"


HEAVY = {
    "millions of tensors": names(1_600_000),
    "as many names as are parsed": names(8 * MAX_TENSORS),
    "millions of lists": fill(b"[],"),
    "millions of objects": fill(b"{},"),
    "millions of numbers": fill(b"0,"),
    "millions of fractions": fill(b"0.5,"),
    "millions of texts": fill(b'"",'),
    "one long text": b'{"__metadata__":{"a":"' + b"x" * (MAX_HEADER_BYTES - 100) + b'"}}',
    "many colons in a text": b'{"__metadata__":{"a":"' + b":" * (MAX_HEADER_BYTES - 100) + b'"}}',
    "nesting": b'{"t":' + b"[" * (MAX_HEADER_BYTES - 10) + b"}",
    "escapes": b'{"__metadata__":{"a":"' + b"\\u00e9" * (MAX_HEADER_BYTES // 6 - 10) + b'"}}',
}


def run(*folders: Path) -> list[str]:
    command = [sys.executable, "-c", READ, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_heaviest_headers_are_read_within_bounded_memory_and_time(tmp_path: Path) -> None:
    folders = {name: zoo.write_adapter(tmp_path / name.replace(" ", "-")) for name in HEAVY}
    for name, header in HEAVY.items():
        assert len(header) <= MAX_HEADER_BYTES
        hostile.join(folders[name], header, b"")
    said = dict(zip(HEAVY, run(*folders.values()), strict=True))
    sound = {"one long text", "escapes"}
    assert {name for name, codes in said.items() if codes == "sound"} == sound, said


def test_the_heaviest_configurations_are_read_within_bounded_memory_and_time(tmp_path: Path) -> None:
    """Patterns at every limit, against long names made to be tried over and over: the worst that passes the check."""
    literal = {f"layers.{number}.self_attn.q_pro": 4 for number in range(lora.MAX_PATTERNS)}
    wild = {"a*a*" + "b" * (lora.MAX_PATTERN_CHARS - 4): 4, ".*.*x": 4, "(.*a|.*b)x": 4, "a+a+x": 4}
    configs: list[dict[str, object]] = [
        {"rank_pattern": literal, "target_modules": ["a" * 100] * lora.MAX_PATTERNS},
        {"rank_pattern": wild, "alpha_pattern": wild},
        {"target_modules": ".*.*x"},
        {"target_modules": "a*a*" + "b" * 200},
    ]
    folders = [zoo.write_adapter(tmp_path / str(number)) for number in range(len(configs))]
    for folder, config in zip(folders, configs, strict=True):
        zoo.edit_config(folder, **config)
        nothing = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
        keys = [f"{'a' * 120}{'.a' * 60}.{number}" for number in range(50)]
        hostile.join(folder, json.dumps(dict.fromkeys(keys, nothing)).encode(), b"")
    assert run(*folders) == ["sound"] * len(configs)


@pytest.mark.parametrize("kind", ["linked_device", "pipe_as_tensors", "pipe_as_config", "socket_as_tensors"])
def test_what_never_ends_is_never_read(kind: str, tmp_path: Path) -> None:
    folder = zoo.write_adapter(tmp_path / "adapter")
    zoo.HOSTILE[kind].spoil(folder)
    assert set(run(folder)[0].split()) == zoo.HOSTILE[kind].codes
