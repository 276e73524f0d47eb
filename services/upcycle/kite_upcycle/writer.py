"""Writing a safetensors file tensor by tensor: what dtype each has is known when it comes, so the header is last."""

import math
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kite_upcycle import header
from kite_upcycle.factors import bytes_of
from kite_upcycle.header import LENGTH_BYTES, Entry

if TYPE_CHECKING:
    import torch

_WIDEST = "BF16"  # the longest name of a dtype that is written
_WIDEST_BYTES = 4


class Writer:
    """One file, written in one pass. Room for the header is kept at its beginning and filled up with spaces."""

    def __init__(self, path: Path, names: Sequence[str], elements: int) -> None:
        """`names` are all tensors that will come, `elements` is how many numbers they have at most."""
        self._path = path
        most = elements * _WIDEST_BYTES
        self._head_bytes = len(header.build([Entry(name, _WIDEST, (elements, elements), most, most) for name in names]))
        self._entries: list[Entry] = []
        self._at = 0

    def __enter__(self) -> Self:
        self._file = FileIO(self._path, "w")
        self._file.seek(self._head_bytes)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is None:
                self._file.seek(0)
                _write_all(self._file, memoryview(self._header()))

    def write(self, name: str, tensor: "torch.Tensor") -> None:
        """Append a tensor of two dimensions."""
        import torch

        dtype = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[tensor.dtype]
        stop = self._at + math.prod(tensor.shape) * tensor.element_size()
        self._entries.append(Entry(name, dtype, tuple(tensor.shape), self._at, stop))
        self._at = stop
        _write_all(self._file, bytes_of(tensor.contiguous()))

    def _header(self) -> bytes:
        raw = header.build(self._entries)[LENGTH_BYTES:].ljust(self._head_bytes - LENGTH_BYTES)
        return len(raw).to_bytes(LENGTH_BYTES, "little") + raw


def _write_all(file: FileIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]
