"""The safetensors header, read with bounds before anything is allocated, and written by the blend.

Layout (github.com/huggingface/safetensors, "Format"): 8 bytes little-endian length, that many bytes of JSON, data.
Offsets in the JSON count from the start of the data; the data has no holes.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from kite_upcycle import strict
from kite_upcycle.violations import Code, Violation, violation

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 16 * 1024 * 1024
MAX_TENSORS = 65_536
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 2**48  # what no file holds; above 2^63 other readers overflow
# Brackets, colons and commas: a bound on the objects that parsing makes. The entry of a matrix has 13 of them.
MAX_MARKS = 16 * MAX_TENSORS
ALIGNMENT_BYTES = 8
METADATA = "__metadata__"
PLAIN: Mapping[str, str] = {"format": "pt"}  # as safetensors writes for torch
# A type outside this table has an unknown width: its entry is kept, only its length cannot be checked.
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "F64": 8, "I64": 8, "U64": 8, "C64": 8,
}  # fmt: skip
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,256}")


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: `start` and `stop` are byte offsets from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """The entries that are well formed, in file order; `data_start` is the byte at which the data begins.

    `metadata` are the texts that the format keeps beside the tensors.
    """

    entries: Mapping[str, Entry]
    data_start: int
    metadata: Mapping[str, str]


def read_length(first: bytes, file_bytes: int) -> int | Violation:
    """Decode the length of the header, or say why it cannot be one."""
    length = int.from_bytes(first, "little")
    room = min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES)
    if len(first) == LENGTH_BYTES and 0 < length <= room:
        return length
    return violation(Code.HEADER_SIZE, "header", expected=f"1 to {max(room, 0)} bytes", found=f"{length} bytes")


def parse(raw: bytes, data_bytes: int) -> tuple[Header | None, list[Violation]]:
    """Parse header JSON against the size of the data that follows it; every violation is returned."""
    marks = sum(map(raw.count, (b"{", b"[", b":", b",")))
    if marks > MAX_MARKS:
        expected, found = f"at most {MAX_TENSORS} tensors", f"{marks} brackets, colons and commas"
        return None, [violation(Code.TENSOR_COUNT, "header", expected=expected, found=found)]
    try:
        document = _parse_object(raw)
    except ValueError as error:
        return None, [violation(Code.HEADER_JSON, "header", expected="strict JSON object", found=str(error))]
    metadata, wrong = _metadata(document.pop(METADATA, {}))
    if len(document) > MAX_TENSORS:
        found = f"{len(document)} tensors"
        return None, [violation(Code.TENSOR_COUNT, "header", expected=f"at most {MAX_TENSORS}", found=found)]
    entries, found = _collect(document, data_bytes)
    return Header(entries, LENGTH_BYTES + len(raw), metadata), [*wrong, *found]


def _parse_object(raw: bytes) -> dict[str, strict.JSON]:
    if raw.startswith(b"{"):
        return strict.parse_object(raw)
    msg = f"an object at the first byte is needed, as other readers insist: {raw[:8]!r}"
    raise ValueError(msg)


def _metadata(document: strict.JSON) -> tuple[dict[str, str], list[Violation]]:
    """Return the texts; safetensors refuses a file in which one is anything else."""
    if isinstance(document, dict):
        texts = {key: value for key, value in document.items() if isinstance(value, str)}
        if len(texts) == len(document):
            return texts, []
    found = json.dumps(document)
    return {}, [violation(Code.HEADER_JSON, METADATA, expected="an object of texts", found=found)]


def _collect(document: dict[str, strict.JSON], data_bytes: int) -> tuple[dict[str, Entry], list[Violation]]:
    """Return the entries in file order, and what is wrong with them or with the data's layout."""
    entries: dict[str, Entry] = {}
    found: list[Violation] = []
    for name, fields in document.items():
        entry = _entry(name, fields)
        if isinstance(entry, Violation):
            found.append(entry)
        else:
            entries[name] = entry
    ordered = sorted(entries.values(), key=lambda entry: (entry.start, entry.stop))
    if not found:  # with an entry missing, the layout of the rest says nothing
        found.extend(_layout(ordered, data_bytes))
    return {entry.name: entry for entry in ordered}, found


def _entry(name: str, fields: strict.JSON) -> Entry | Violation:
    match fields:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, stop], **rest} if not rest:
            sizes, offsets = _naturals(shape), _naturals([start, stop])
            if sizes is not None and offsets is not None and _sound(entry := Entry(name, dtype, sizes, *offsets)):
                return entry
        case _:
            pass
    expected = "a name of letters, digits and ._-, with dtype, shape and data_offsets that agree"
    return violation(Code.TENSOR_ENTRY, name, expected=expected, found=json.dumps(fields))


def _naturals(values: list[strict.JSON]) -> tuple[int, ...] | None:
    found = tuple(value for value in values if type(value) is int and 0 <= value <= MAX_ELEMENTS)
    return found if len(found) == len(values) <= MAX_DIMENSIONS else None


def _sound(entry: Entry) -> bool:
    width = DTYPE_BYTES.get(entry.dtype)
    length = entry.stop - entry.start
    named = _NAME.fullmatch(entry.name) is not None
    fits = math.prod(size for size in entry.shape if size) <= MAX_ELEMENTS
    return named and fits and entry.start <= entry.stop and (width is None or entry.elements * width == length)


def _layout(ordered: list[Entry], data_bytes: int) -> Iterator[Violation]:
    end = 0
    for entry in ordered:
        if entry.start != end:
            code = Code.TENSOR_OVERLAP if entry.start < end else Code.TENSOR_GAP
            yield violation(code, entry.name, expected=f"start at byte {end}", found=f"byte {entry.start}")
        end = max(end, entry.stop)
    if end != data_bytes:
        yield violation(Code.DATA_SIZE, "data", expected=f"{end} bytes", found=f"{data_bytes} bytes")


def build(entries: Iterable[Entry], metadata: Mapping[str, str] = PLAIN) -> bytes:
    """Return length and JSON for entries in file order, padded so that the data is aligned."""
    document: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    for entry in entries:
        fields = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [entry.start, entry.stop]}
        document[entry.name] = fields
    raw = json.dumps(document, separators=(",", ":")).encode("ascii")
    padded = raw + b" " * (-len(raw) % ALIGNMENT_BYTES)
    return len(padded).to_bytes(LENGTH_BYTES, "little") + padded
