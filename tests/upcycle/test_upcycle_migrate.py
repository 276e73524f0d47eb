"""Migrating stamps: version 1 becomes version 2 in place, after a backup, whole or not at all, and never back."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kite.errors import MissingPath, UsageError
from kite.testing.zoo.samples import write_adapter, write_base
from kite_upcycle import migrate, reader, stamp
from kite_upcycle.base import Base
from kite_upcycle.imprint import imprint
from kite_upcycle.layout import Serving
from kite_upcycle.migrate import BACKUP_NAME, Migrated, Step
from kite_upcycle.reader import CONFIG_NAME, TENSORS_NAME
from kite_upcycle.rewrite import Unwritable, rewrite
from kite_upcycle.stamp import Demand
from kite_upcycle.testing import older
from kite_upcycle.verify import Limits, verify

WIDE = Limits(max_lora_rank=16, params_share_max_ppm=1_000_000)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base.load(write_base(tmp_path_factory.mktemp("bases") / "tiny"))


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory, base: Base) -> Path:
    """An adapter as version 3.5 stamped it."""
    folder = write_adapter(tmp_path_factory.mktemp("old") / "credit")
    assert imprint(folder, base, Serving()).outcome == "stamped"
    rewrite(folder, older)
    return folder


@pytest.fixture
def credit(tmp_path: Path, old: Path) -> Path:
    return shutil.copytree(old, tmp_path / "adapters" / "credit")


def metadata(path: Path) -> dict[str, str]:
    with reader.read(path) as adapter:
        return dict(adapter.tensors.metadata)


def states(steps: list[Step]) -> dict[str, str]:
    return {step.path.name: step.state for step in steps}


def done(steps: list[Step]) -> list[Migrated]:
    return list(migrate.migrate(steps, lambda _: None))


def test_a_migrated_adapter_keeps_the_strict_contract(credit: Path, base: Base) -> None:
    assert not verify(credit, base, WIDE, demand=Demand(strict=True)).accepted
    before = (credit / TENSORS_NAME).read_bytes()

    (result,) = done(migrate.plan(credit, 1))

    assert result.error is None
    assert verify(credit, base, WIDE, demand=Demand(strict=True)).accepted
    assert metadata(credit) == {**metadata(credit), **stamp.of(base, Serving()).metadata()}
    assert (credit / BACKUP_NAME).read_bytes() == before
    assert sorted(path.name for path in credit.iterdir()) == [CONFIG_NAME, TENSORS_NAME, BACKUP_NAME]


def test_the_backup_is_the_way_back(credit: Path) -> None:
    before = reader.digest(credit)
    done(migrate.plan(credit, 1))
    (credit / BACKUP_NAME).replace(credit / TENSORS_NAME)
    assert reader.digest(credit) == before


def test_a_second_time_there_is_nothing_to_do(credit: Path) -> None:
    done(migrate.plan(credit, 1))
    once = reader.digest(credit)
    assert states(migrate.plan(credit, 1)) == {"credit": "current"}
    assert done(migrate.plan(credit, 1)) == []
    rewrite(credit, migrate.raised)
    assert reader.digest(credit) == once


def test_a_folder_is_planned_adapter_by_adapter(credit: Path) -> None:
    root = credit.parent
    write_adapter(root / "deep" / "down" / "plain")
    rewrite(shutil.copytree(credit, root / "newer"), lambda found: {**found, stamp.VERSION: "3"})
    rewrite(shutil.copytree(credit, root / "forged"), lambda found: {**found, stamp.LAYOUT_HASH: "0" * 16})
    (shutil.copytree(credit, root / "stored") / "manifest.json").write_text("{}")
    (shutil.copytree(credit, root / "broken") / TENSORS_NAME).write_bytes(b"?")
    shutil.copytree(credit, root / ".hidden")
    (root / "linked").symlink_to(credit)
    (root / "empty").mkdir()

    steps = migrate.plan(root, 1)

    assert states(steps) == {
        "credit": "migrate",
        "plain": "unstamped",
        "newer": "newer",
        "forged": "unreadable",
        "stored": "stored",
        "broken": "unreadable",
    }
    assert [step.path for step in steps] == sorted(step.path for step in steps)
    assert [result.step.path for result in done(steps)] == [credit]


def test_planning_changes_nothing(credit: Path) -> None:
    before = reader.digest(credit)
    migrate.plan(credit.parent, 1)
    assert reader.digest(credit) == before
    assert not (credit / BACKUP_NAME).exists()


@pytest.mark.parametrize("after", ["backup", "stamp"])
def test_killed_in_the_middle_an_adapter_is_old_or_new(after: str, credit: Path, base: Base) -> None:
    old_digest = reader.digest(credit)
    at = {"backup": 1, "stamp": 2}[after]
    program = (
        "import os, sys\nfrom pathlib import Path\nfrom kite_upcycle import migrate\n"
        "rename, renamed = os.rename, []\n"
        "def once(*names, **where):\n"
        "    rename(*names, **where)\n"
        "    renamed.append(names)\n"
        f"    if len(renamed) == {at}: os.kill(os.getpid(), 9)\n"
        "os.rename = once\n"
        "list(migrate.migrate(migrate.plan(Path(sys.argv[1]), 1), lambda _: None))\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(credit)], check=False, capture_output=True, text=True)
    assert killed.returncode == -9, killed.stderr

    assert (reader.digest(credit) == old_digest) == (after == "backup")
    assert len(done(migrate.plan(credit, 1))) == (after == "backup")
    assert verify(credit, base, WIDE, demand=Demand(strict=True)).accepted


def test_another_backup_is_never_overwritten(credit: Path) -> None:
    (credit / BACKUP_NAME).write_bytes(b"the only copy of something")
    before = reader.digest(credit)

    (result,) = done(migrate.plan(credit, 1))

    assert isinstance(result.error, Unwritable)
    assert BACKUP_NAME in str(result.error)
    assert reader.digest(credit) == before
    assert (credit / BACKUP_NAME).read_bytes() == b"the only copy of something"


def test_one_that_fails_does_not_keep_the_others(credit: Path) -> None:
    other = shutil.copytree(credit, credit.parent / "another")
    (other / BACKUP_NAME).write_bytes(b"?")
    results = done(migrate.plan(credit.parent, 1))
    assert [(result.step.path.name, result.error is None) for result in results] == [
        ("another", False),
        ("credit", True),
    ]


def test_there_is_no_way_back() -> None:
    assert migrate.source_version("3.5") == migrate.source_version("1") == 1
    with pytest.raises(UsageError, match="no way back"):
        migrate.source_version("2")
    with pytest.raises(UsageError, match="'4' are known"):
        migrate.source_version("4")


def test_a_folder_that_cannot_be_listed_is_said(tmp_path: Path) -> None:
    with pytest.raises(MissingPath, match="cannot be listed"):
        migrate.plan(tmp_path / "nowhere", 1)
