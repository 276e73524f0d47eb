"""Bringing an adapter below the root: whole or not at all, and never what could not be hashed."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kite.errors import MissingPath, UsageError
from kite_cli.asking.intake import AdapterRootUnusable, bring, proper
from kite_upcycle.reader import digest
from kite_upcycle.violations import UnreadableAdapter

Make = Callable[..., Path]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    return root


def test_an_adapter_from_elsewhere_is_copied_once(make_adapter: Make, root: Path):
    path = make_adapter("credit", seed=1)
    first = bring(path, root)
    assert first.copied_to == root / first.ref.path
    assert first.ref.name == "credit"
    assert first.ref.path == f"adapters/credit-{first.ref.digest[:12]}"
    assert digest(root / first.ref.path) == digest(path) == first.ref.digest
    second = bring(path, root)
    assert second.ref == first.ref
    assert [folder.name for folder in (root / "adapters").iterdir()] == [Path(first.ref.path).name]


def test_one_below_the_root_stays_where_it_is(make_adapter: Make, root: Path):
    inside = make_adapter("credit", seed=1).rename(root / "mine")
    brought = bring(inside, root, name="credit")
    assert brought.copied_to is None
    assert (brought.ref.name, brought.ref.path) == ("credit", "mine")


def test_only_the_files_of_an_adapter_are_copied(make_adapter: Make, root: Path):
    path = make_adapter("credit", seed=1)
    (path / "README.md").write_text("notes")
    copied = root / bring(path, root).ref.path
    assert sorted(file.name for file in copied.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


def test_what_cannot_be_read_safely_is_not_copied(make_adapter: Make, root: Path, tmp_path: Path):
    linked = make_adapter("linked", seed=1)
    tensors = linked / "adapter_model.safetensors"
    tensors.rename(tmp_path / "elsewhere")
    tensors.symlink_to(tmp_path / "elsewhere")
    pickled = make_adapter("pickled", seed=1)
    (pickled / "adapter_model.bin").write_bytes(b"\x80\x04")
    for path, code in ((linked, "symlink"), (pickled, "pickle_file")):
        with pytest.raises(UnreadableAdapter) as caught:
            bring(path, root)
        assert [violation.code for violation in caught.value.violations] == [code]
    assert list(root.iterdir()) == []


def test_a_damaged_copy_is_not_taken_for_the_adapter(make_adapter: Make, root: Path):
    path = make_adapter("credit", seed=1)
    copied = root / bring(path, root).ref.path
    (copied / "adapter_config.json").write_text("{}")
    with pytest.raises(AdapterRootUnusable, match="another content"):
        bring(path, root)


def test_paths_and_roots_that_are_not_there(tmp_path: Path, make_adapter: Make):
    with pytest.raises(MissingPath, match="not a folder"):
        bring(tmp_path / "nope", tmp_path)
    path = make_adapter("credit", seed=1)
    with pytest.raises(UsageError, match="adapter root"):
        bring(path, None)
    (tmp_path / "file").write_text("")
    with pytest.raises(AdapterRootUnusable):
        bring(path, tmp_path / "file" / "root")


@pytest.mark.parametrize(
    ("name", "expected"), [("a b", "a-b"), ("…", "adapter"), (".hidden", "hidden"), ("x" * 99, "x" * 64)]
)
def test_a_folder_may_be_called_anything(name: str, expected: str):
    assert proper(name) == expected
