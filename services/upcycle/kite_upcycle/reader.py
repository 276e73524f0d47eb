"""Reading an adapter folder: configuration, header and tensors, from one descriptor each.

Tensors are read here rather than by `safetensors.safe_open`, which opens the path a second time: what was checked would
not be what is read.
"""

from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kite_upcycle import files, header, strict
from kite_upcycle.header import LENGTH_BYTES, Entry
from kite_upcycle.violations import Code, UnreadableAdapter, Violation, violation

if TYPE_CHECKING:
    import torch

CONFIG_NAME = "adapter_config.json"
TENSORS_NAME = "adapter_model.safetensors"
MANIFEST_NAME = "manifest.json"
PICKLE_NAMES = ("adapter_model.bin", "adapter_model.pt")
VOCABULARY_NAMES = ("new_embeddings.safetensors", "new_embeddings.bin")
MAX_CONFIG_BYTES = 1024 * 1024
MAX_MANIFEST_BYTES = 1024 * 1024
MAX_TENSORS_BYTES = 4 * 1024**3
SUPPORTED_DTYPES = ("BF16", "F16", "F32")
_BOUNDS = {CONFIG_NAME: MAX_CONFIG_BYTES, TENSORS_NAME: MAX_TENSORS_BYTES, MANIFEST_NAME: MAX_MANIFEST_BYTES}


@dataclass(frozen=True)
class Tensors:
    """An open safetensors file. `sound` is false when header and file disagree: then nothing may be loaded.

    `state` is the file's when it was opened (`files.state_of`).
    """

    file: FileIO
    entries: Mapping[str, Entry]
    data_start: int
    metadata: Mapping[str, str]
    sound: bool
    state: tuple[int, int]

    def changed(self) -> list[Violation]:
        """Say whether the file was written to since it was opened: what was read is then not what was hashed."""
        return _changed(self.file, TENSORS_NAME, self.state)

    def load(self, name: str) -> "torch.Tensor":
        """Read one tensor in its shape and dtype (one of `SUPPORTED_DTYPES`); raises EOFError if the file shrank."""
        import torch

        entry = self.entries[name]
        dtype = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[entry.dtype]
        raw = bytearray(entry.stop - entry.start)
        if files.read_at(self.file, self.data_start + entry.start, raw) < len(raw):
            msg = f"{name}: the file became shorter while it was read"
            raise EOFError(msg)
        return torch.frombuffer(raw, dtype=dtype).reshape(entry.shape) if raw else torch.zeros(entry.shape, dtype=dtype)


@dataclass(frozen=True)
class Findings:
    """All that could be read, and all that is wrong. Holds the open tensor file: use `with`."""

    config: dict[str, strict.JSON] | None
    tensors: Tensors | None
    digest: str | None
    violations: tuple[Violation, ...]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.tensors is not None:
            self.tensors.file.close()


@dataclass(frozen=True)
class Adapter:
    """An adapter that is safe to read; whether it fits is for `verify` to say. Holds an open file: use `with`."""

    path: Path
    config: dict[str, strict.JSON]
    tensors: Tensors
    digest: str

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.tensors.file.close()


def read(path: Path, *, root: Path | None = None) -> Adapter:
    """Open the adapter folder `path`, which lies below `root` when one is given (a relative path starts there).

    Raises UnreadableAdapter with every violation.
    """
    findings = examine(path, root=root)
    if findings.violations or findings.config is None or findings.tensors is None or findings.digest is None:
        with findings:
            raise UnreadableAdapter(str(path), findings.violations)
    return Adapter(path, findings.config, findings.tensors, findings.digest)


def digest(path: Path, *, root: Path | None = None) -> str:
    """Return the content address of an adapter folder: hex sha256 over its files, framed with names and lengths.

    The files are configuration, tensors and, in a stored version, the manifest. Raises UnreadableAdapter when one is
    missing or is not a plain file of allowed size.
    """
    with _opened(path, root) as (opened, violations):
        if violations:
            raise UnreadableAdapter(str(path), tuple(violations))
        return files.frame(opened.items())


def examine(path: Path, *, root: Path | None = None) -> Findings:
    """Read what can be read of an adapter folder and collect every violation; bad content never raises."""
    with _opened(path, root) as (opened, violations):
        before = {name: files.state_of(file) for name, file in opened.items()}
        complete = CONFIG_NAME in opened and TENSORS_NAME in opened
        config, wrong = _read_config(opened[CONFIG_NAME]) if CONFIG_NAME in opened else (None, [])
        violations.extend(wrong)
        address = files.frame(opened.items()) if complete else None
        violations.extend(found for name, file in opened.items() for found in _changed(file, name, before[name]))
        tensors, wrong = (
            _read_header(opened.pop(TENSORS_NAME), before[TENSORS_NAME]) if TENSORS_NAME in opened else (None, [])
        )
        violations.extend(wrong)
        return Findings(config, tensors, address, tuple(violations))


@contextmanager
def _opened(path: Path, root: Path | None) -> Generator[tuple[dict[str, FileIO], list[Violation]]]:
    """Yield the open files by name, and what is wrong with the folder; a file that is popped outlives the block."""
    opened: dict[str, FileIO] = {}
    with files.open_folder(path, root) as folder:
        violations = [folder] if isinstance(folder, Violation) else list(_open_all(folder, opened))
    try:
        yield opened, violations
    finally:
        with ExitStack() as stack:
            for file in opened.values():
                stack.enter_context(file)


def _open_all(folder: int, opened: dict[str, FileIO]) -> Iterator[Violation]:
    pickles = [name for name in PICKLE_NAMES if files.exists(folder, name)]
    for name in pickles:
        yield violation(Code.PICKLE_FILE, name, expected="safetensors only: a pickle runs code", found="a pickle")
    for name in VOCABULARY_NAMES:
        if files.exists(folder, name):
            yield violation(Code.VOCABULARY, name, expected="the vocabulary of the base", found="added embeddings")
    for name, max_bytes in _BOUNDS.items():
        present = files.exists(folder, name)
        if not present and (name == MANIFEST_NAME or (name == TENSORS_NAME and pickles)):
            continue  # only stored versions have a manifest; and a pickle instead of tensors is one fault, not two
        file = files.open_file(folder, name, max_bytes)
        if isinstance(file, Violation):
            yield file
        else:
            opened[name] = file


def _changed(file: FileIO, name: str, before: tuple[int, int]) -> list[Violation]:
    if files.state_of(file) == before:
        return []
    found = f"a change while it was read, {before[0]} to {files.size_of(file)} bytes"
    return [violation(Code.FILE_CHANGED, name, expected="a file at rest", found=found)]


def _read_config(file: FileIO) -> tuple[dict[str, strict.JSON] | None, list[Violation]]:
    raw = bytearray(files.size_of(file))
    files.read_at(file, 0, raw)
    try:
        return strict.parse_object(bytes(raw)), []
    except ValueError as error:
        return None, [violation(Code.CONFIG_JSON, CONFIG_NAME, expected="strict JSON object", found=str(error))]


def _read_header(file: FileIO, state: tuple[int, int]) -> tuple[Tensors | None, list[Violation]]:
    found, violations = read_header(file)
    if found is None:
        file.close()
        return None, violations
    tensors = Tensors(file, found.entries, found.data_start, found.metadata, sound=not violations, state=state)
    return tensors, violations


def read_header(file: FileIO) -> tuple[header.Header | None, list[Violation]]:
    """Read and check the header of an open safetensors file."""
    size = files.size_of(file)
    first = bytearray(LENGTH_BYTES)
    length = header.read_length(bytes(first[: files.read_at(file, 0, first)]), size)
    if isinstance(length, Violation):
        return None, [length]
    raw = bytearray(length)
    files.read_at(file, LENGTH_BYTES, raw)
    return header.parse(bytes(raw), size - LENGTH_BYTES - length)


@contextmanager
def one_thread() -> Generator[None]:
    """Run torch on one thread: two measured 3 to 9 times slower on such small matrices (two cores)."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
