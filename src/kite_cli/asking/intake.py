"""Bringing an adapter below the adapter root: what lies elsewhere is copied there whole, or not at all."""

import os
import re
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kite.errors import Fault, KiteError, MissingPath, UsageError
from kite_schemas.model import NAME_MAX_CHARS
from kite_schemas.upcycle import AdapterRef

ADAPTERS = "adapters"
SHORT_DIGEST_CHARS = 12
FOLDER_MODE = 0o755  # the services and vLLM may run as other users
FILE_MODE = 0o644
_ODD = re.compile(r"[^A-Za-z0-9._-]+")


class AdapterRootUnusable(KiteError):
    """The adapter root cannot be written, or holds something else where this adapter belongs."""

    code = "adapter_root_unusable"
    fault = Fault.OPERATOR

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(
            f"cannot bring the adapter to {path}: {why}", hint="see who owns the adapter root, and its disk"
        )
        self.path = path


@dataclass(frozen=True, slots=True)
class Brought:
    """An adapter below the root, and the folder it was copied to when it was not there before."""

    ref: AdapterRef
    copied_to: Path | None


def bring(path: Path, root: Path | None, name: str | None = None) -> Brought:
    """Return the adapter at `path` as the fleet knows it, copied to `<root>/adapters/<name>-<sha12>` if need be.

    Raises MissingPath, UsageError without a root, UnreadableAdapter with every violation, and AdapterRootUnusable.
    """
    from kite_upcycle.reader import digest

    if root is None:
        raise UsageError("the adapter root of the fleet is not known", hint="name --dir, or set KITE_ADAPTER_ROOT")
    if not path.is_dir():
        raise MissingPath(f"adapter {path} is not a folder", hint="give the folder that PEFT's save_pretrained wrote")
    called = name or proper(path.resolve().name)
    if called != proper(called):
        raise UsageError(f"{called!r} cannot be the name of an adapter", hint=f"as in {proper(called)!r}")
    inside = _below(path, root)
    if inside is not None:
        return Brought(AdapterRef(name=called, path=str(inside), digest=digest(inside, root=root)), None)
    target, address = _copy(path, root / ADAPTERS, called)
    return Brought(AdapterRef(name=called, path=str(target.relative_to(root)), digest=address), target)


def proper(name: str) -> str:
    """Turn a folder's name into the name of an adapter.

    >>> proper("my adapter (v2)")
    'my-adapter-v2'
    """
    return _ODD.sub("-", name).strip("._-")[:NAME_MAX_CHARS] or "adapter"


def _below(path: Path, root: Path) -> Path | None:
    full, top = path.resolve(), root.resolve()
    return full.relative_to(top) if full.is_relative_to(top) else None


def _copy(path: Path, folder: Path, name: str) -> tuple[Path, str]:
    """Copy and return (folder, digest of the copy): what is hashed is what will be read."""
    from kite_upcycle.reader import digest

    digest(path)  # refuses pickles, symlinks and what is too large, before anything is copied
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _scratch(folder) as scratch:
            _copy_files(path, scratch)
            address = digest(scratch)
            target = folder / f"{name[: NAME_MAX_CHARS - SHORT_DIGEST_CHARS]}-{address[:SHORT_DIGEST_CHARS]}"
            if not target.exists():
                scratch.rename(target)
    except OSError as error:
        raise AdapterRootUnusable(folder, error.strerror or str(error)) from error
    if digest(target) != address:
        raise AdapterRootUnusable(target, "the folder is there with another content")
    return target, address


@contextmanager
def _scratch(folder: Path) -> Generator[Path]:
    """Give a folder that is removed at the end unless it was renamed away."""
    scratch = Path(tempfile.mkdtemp(dir=folder, prefix=".incoming-"))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _copy_files(path: Path, scratch: Path) -> None:
    from kite_upcycle.reader import CONFIG_NAME, MANIFEST_NAME, TENSORS_NAME

    for name in (CONFIG_NAME, TENSORS_NAME, MANIFEST_NAME):
        if not os.path.lexists(path / name):
            continue
        shutil.copyfile(path / name, scratch / name, follow_symlinks=False)
        if not (scratch / name).is_symlink():
            (scratch / name).chmod(FILE_MODE)
    scratch.chmod(FOLDER_MODE)
