"""Adapters whose files are made to harm whoever reads them: nothing of them may be loaded."""

import json
import os
import pickle
import socket
from collections.abc import Callable, Mapping
from contextlib import chdir, closing
from pathlib import Path
from typing import TypeAlias, cast

from kite.testing.adapters import CONFIG_NAME, TENSORS_NAME
from kite.testing.zoo.animal import Defect, placed

LENGTH_BYTES = 8
METADATA = "__metadata__"
Header: TypeAlias = dict[str, object]
Entry: TypeAlias = dict[str, object]
MANY = 70_000  # tensors; more than a header may name
LARGE_BYTES = 8 * 1024**3  # sparse: it takes no space
NESTED = 100_000
PICKLED = pickle.dumps({"base_model.model.x.lora_A.weight": [0.0] * 100})


# -------------------------------------------------------------------------------------------------------- raw headers


def split(folder: Path) -> tuple[Header, bytes]:
    """Return header and data of an adapter's tensors."""
    raw = (folder / TENSORS_NAME).read_bytes()
    length = int.from_bytes(raw[:LENGTH_BYTES], "little")
    return cast("Header", json.loads(raw[LENGTH_BYTES : LENGTH_BYTES + length])), raw[LENGTH_BYTES + length :]


def join(folder: Path, header: bytes, data: bytes) -> None:
    """Write an adapter's tensors from raw header and data, whatever they are."""
    (folder / TENSORS_NAME).write_bytes(len(header).to_bytes(LENGTH_BYTES, "little") + header + data)


def edit_header(folder: Path, change: Callable[[Header], object]) -> None:
    """Let `change` edit the header in place; the data stays."""
    header, data = split(folder)
    change(header)
    join(folder, json.dumps(header).encode(), data)


def entry(header: Header, name: str) -> Entry:
    """Return the fields of one tensor."""
    return cast("Entry", header[name])


def offsets(header: Header, name: str) -> list[int]:
    """Return where a tensor starts and stops, in bytes from the start of the data; nothing for the metadata."""
    return cast("list[int]", entry(header, name).get("data_offsets", []))


def last_name(header: Header) -> str:
    """Return the name of the tensor whose data comes last."""
    return max(header, key=lambda name: offsets(header, name))


def _raw_header(make: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Replace the header's text by `make` of it; its length is told rightly, the data stays."""

    def change(folder: Path) -> None:
        header, data = split(folder)
        join(folder, make(json.dumps(header).encode()), data)

    return change


def _length(length: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        raw = (folder / TENSORS_NAME).read_bytes()
        (folder / TENSORS_NAME).write_bytes(length.to_bytes(LENGTH_BYTES, "little") + raw[LENGTH_BYTES:])

    return change


def _shift_last(count: int) -> Callable[[Path], None]:
    """Move the last tensor back into its neighbour, or away from it; the data still ends where it ends."""

    def change(folder: Path) -> None:
        header, data = split(folder)
        name = last_name(header)
        entry(header, name)["data_offsets"] = [offset + count for offset in offsets(header, name)]
        join(folder, json.dumps(header).encode(), data + bytes(count) if count > 0 else data[:count])

    return change


def _stranger(name: str = "stranger", **fields: object) -> Callable[[Path], None]:
    """Add an entry; by default it is a sound one, of no bytes."""
    sound: Entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    return lambda folder: edit_header(folder, lambda header: header.update({name: sound | fields}))


def _metadata(value: object) -> Callable[[Path], None]:
    return lambda folder: edit_header(folder, lambda header: header.update({METADATA: value}))


# -------------------------------------------------------------------------------------------------------------- files


def _write(name: str, content: bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return change


def _resize(name: str, change_bytes: Callable[[int], int]) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, change_bytes((folder / name).stat().st_size))


def _remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _link_file(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        moved = (folder / name).rename(folder.parent / f"moved-{name}")
        (folder / name).symlink_to(moved)

    return change


def _link_device(folder: Path) -> None:
    (folder / TENSORS_NAME).unlink()
    (folder / TENSORS_NAME).symlink_to("/dev/zero")


def _instead(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return change


def _socket(path: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as listener, chdir(path.parent):
        listener.bind(path.name)  # by its name alone: a socket's path has at most 107 bytes


def _pickle_alone(folder: Path) -> None:
    (folder / TENSORS_NAME).unlink()
    (folder / "adapter_model.bin").write_bytes(PICKLED)


def _torch_file(folder: Path) -> None:
    import torch

    torch.save({"base_model.model.x.lora_A.weight": torch.ones(4)}, folder / TENSORS_NAME)


# -------------------------------------------------------------------------------------------------------------- paths


def _rename_folder(name: str) -> Callable[[Path], Path]:
    return lambda folder: Path(folder.rename(folder.parent / name).name)


def _link_folder(folder: Path) -> Path:
    (folder.parent / "alias").symlink_to(folder.name)
    return Path("alias")


def _link_parent(folder: Path) -> Path:
    (folder.parent / "group").symlink_to(".")
    return Path("group") / folder.name


# ------------------------------------------------------------------------------------------------------------ the zoo

PLACES: Mapping[str, Defect] = {
    "climbing_out": placed("outside_root", change=lambda _: Path("..") / "secret"),
    "climbing_within": placed("outside_root", change=lambda folder: Path(f"{folder.name}/../../secret")),
    "elsewhere": placed("outside_root", change=lambda _: Path("/etc")),
    "name_with_blank": placed("path_name", change=_rename_folder("a b")),
    "hidden_name": placed("path_name", change=_rename_folder(".hidden")),
    "option_name": placed("path_name", change=_rename_folder("-rf")),
    "name_with_newline": placed("path_name", change=_rename_folder("a\nb")),
    "linked_folder": placed("symlink", change=_link_folder),
    "linked_parent": placed("symlink", change=_link_parent),
    "linked_tensors": placed("symlink", change=_link_file(TENSORS_NAME)),
    "linked_config": placed("symlink", change=_link_file(CONFIG_NAME)),
    "linked_device": placed("symlink", change=_link_device),
    "no_folder": placed("missing_file", change=lambda _: Path("nowhere")),
    "no_config": placed("missing_file", change=_remove(CONFIG_NAME)),
    "no_tensors": placed("missing_file", change=_remove(TENSORS_NAME)),
    "file_as_folder": placed("not_a_file", change=lambda folder: Path(folder.name) / CONFIG_NAME),
    "pipe_as_tensors": placed("not_a_file", change=_instead(TENSORS_NAME, os.mkfifo)),
    "pipe_as_config": placed("not_a_file", change=_instead(CONFIG_NAME, os.mkfifo)),
    "socket_as_tensors": placed("not_a_file", change=_instead(TENSORS_NAME, _socket)),
    "folder_as_tensors": placed("not_a_file", change=_instead(TENSORS_NAME, Path.mkdir)),
    "large_config": placed("file_size", change=_write(CONFIG_NAME, b" " * 2 * 1024**2)),
    "large_tensors": placed("file_size", change=_resize(TENSORS_NAME, lambda _: LARGE_BYTES)),
    "large_manifest": placed("file_size", change=_write("manifest.json", b" " * 2 * 1024**2)),
    "pickle_beside": placed("pickle_file", change=_write("adapter_model.bin", PICKLED)),
    "pickle_alone": placed("pickle_file", change=_pickle_alone),
    "embeddings_beside": placed("vocabulary", change=_write("new_embeddings.safetensors", b"")),
}

HEADERS: Mapping[str, Defect] = {
    "pickle_renamed": placed("header_size", change=_write(TENSORS_NAME, PICKLED)),
    "torch_file_renamed": placed("header_size", change=_torch_file),
    "nothing": placed("header_size", change=_write(TENSORS_NAME, b"")),
    "stump": placed("header_size", change=_resize(TENSORS_NAME, lambda _: LENGTH_BYTES - 1)),
    "only_a_length": placed("header_size", change=_resize(TENSORS_NAME, lambda _: LENGTH_BYTES)),
    "header_of_nothing": placed("header_size", change=_length(0)),
    "header_huge": placed("header_size", change=_length(2**63)),
    "header_beyond_file": placed("header_size", change=_length(10_000_000)),
    "header_list": placed("header_json", change=_raw_header(lambda raw: b"[" + raw + b"]")),
    "header_cut": placed("header_json", change=_length(100)),
    "header_not_utf8": placed("header_json", change=_raw_header(lambda raw: raw.replace(b"F", b"\xff", 1))),
    "header_after_blanks": placed("header_json", change=_raw_header(lambda raw: b"  " + raw)),
    "header_twice_a_name": placed("header_json", change=_raw_header(lambda raw: raw[:-1] + b"," + raw[1:])),
    "header_nested": placed(
        "header_json", change=_raw_header(lambda _: b'{"a":' + b"[" * NESTED + b"]" * NESTED + b"}")
    ),
    "header_digits": placed("header_json", change=_raw_header(lambda _: b'{"a":' + b"9" * 10_000 + b"}")),
    "header_nan": placed("header_json", change=_raw_header(lambda _: b'{"a":NaN}')),
    "header_surrogate": placed("header_json", change=_metadata({"note": "\ud800"})),
    "metadata_number": placed("header_json", change=_metadata(1)),
    "metadata_of_numbers": placed("header_json", change=_metadata({"format": 1})),
    "many_tensors": placed(
        "tensor_count", change=_raw_header(lambda _: json.dumps({f"t{n}": {} for n in range(MANY)}).encode())
    ),
    "name_climbs": placed("tensor_entry", change=_stranger("../../etc/passwd")),
    "name_empty": placed("tensor_entry", change=_stranger("")),
    "name_long": placed("tensor_entry", change=_stranger("x" * 300)),
    "name_turned": placed("tensor_entry", change=_stranger("q\u202eproj")),
    "entry_of_nothing": placed("tensor_entry", change=lambda folder: edit_header(folder, lambda h: h.update(t=None))),
    "no_dtype": placed("tensor_entry", change=_stranger(dtype=None)),
    "stowaway": placed("tensor_entry", change=_stranger(link="/etc/passwd")),
    "shape_text": placed("tensor_entry", change=_stranger(shape=["0"])),
    "shape_negative": placed("tensor_entry", change=_stranger(shape=[0, -1])),
    "shape_true": placed("tensor_entry", change=_stranger(shape=[0, True])),
    "shape_fraction": placed("tensor_entry", change=_stranger(shape=[0.0])),
    "shape_overflows": placed("tensor_entry", change=_stranger(shape=[2**40, 2**40])),
    "shape_overflows_to_nothing": placed("tensor_entry", change=_stranger(shape=[2**40, 2**40, 0])),
    "shape_beyond_int64": placed("tensor_entry", change=_stranger(shape=[0, 2**70])),
    "shape_endless": placed("tensor_entry", change=_stranger(shape=[10**4000, 10**4000], dtype="X1")),
    "shape_of_many": placed("tensor_entry", change=_stranger(shape=[0] * 9)),
    "offset_alone": placed("tensor_entry", change=_stranger(data_offsets=[0])),
    "offsets_backwards": placed("tensor_entry", change=_stranger(data_offsets=[4, 0])),
    "offsets_negative": placed("tensor_entry", change=_stranger(data_offsets=[-4, -4])),
    "offsets_false": placed("tensor_entry", change=_stranger(data_offsets=[False, False])),
    "offsets_beyond_int64": placed("tensor_entry", change=_stranger(data_offsets=[2**70, 2**70])),
    "offsets_of_other_length": placed("tensor_entry", change=_stranger(data_offsets=[0, 4])),
    "overlap": placed("tensor_overlap", change=_shift_last(-2)),
    "gap": placed("tensor_gap", change=_shift_last(2)),
    "data_cut": placed("data_size", change=_resize(TENSORS_NAME, lambda size: size - 1)),
    "data_trailing": placed("data_size", change=_resize(TENSORS_NAME, lambda size: size + 1)),
}

JSONS: Mapping[str, Defect] = {
    name: placed("config_json", change=_write(CONFIG_NAME, text))
    for name, text in {
        "config_twice_a_key": b'{"r": 4, "r": 64}',
        "config_twice_within": b'{"rank_pattern": {"q": 1, "q": 2}}',
        "config_nan": b'{"lora_alpha": NaN}',
        "config_infinity": b'{"lora_alpha": -Infinity}',
        "config_overflow": b'{"lora_alpha": 1e999}',
        "config_latin1": '{"r": "é"}'.encode("latin-1"),
        "config_utf16": '{"r": 4}'.encode("utf-16"),
        "config_byte_order_mark": b'\xef\xbb\xbf{"r": 4}',
        "config_list": b"[]",
        "config_empty": b"",
        "config_nested": b'{"a":' + b"[" * NESTED + b"]" * NESTED + b"}",
        "config_digits": b'{"r": ' + b"9" * 10_000 + b"}",
        "config_surrogate": b'{"revision": "\\ud800"}',
        "config_cut": b'{"r": 4, "lora_alpha"',
        "config_comment": b'{"r": 4} // rank',
    }.items()
}

HOSTILE: Mapping[str, Defect] = {**PLACES, **HEADERS, **JSONS}
