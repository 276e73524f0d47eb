"""Writing a stamp: exact, atomic, once, and only on what keeps the contract."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load as parse_tensors

from kite.testing import zoo
from kite.testing.zoo.samples import TINY, write_adapter, write_base
from kite_upcycle import reader, stamp
from kite_upcycle.base import Base
from kite_upcycle.imprint import Imprint, StampedForAnother, imprint
from kite_upcycle.layout import Serving
from kite_upcycle.reader import CONFIG_NAME, TENSORS_NAME
from kite_upcycle.rewrite import TEMPORARY, Unwritable, rewrite
from kite_upcycle.violations import Code, UnreadableAdapter

if TYPE_CHECKING:
    from torch import Tensor

KILLED = {
    # The disk's quota ends in the middle of the tensors, and the signal for that is not caught.
    "while the tensors are written": """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (2_048, 2_048))
""",
    "before the flush": "os.fsync = lambda *_: os.kill(os.getpid(), 9)",
    "before the rename": "os.rename = lambda *_, **__: os.kill(os.getpid(), 9)",
}
"""How a writer dies, as code that runs in it first."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base.load(write_base(tmp_path_factory.mktemp("bases") / "tiny"))


@pytest.fixture
def credit(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "credit")


def metadata(path: Path) -> dict[str, str]:
    with reader.read(path) as adapter:
        return dict(adapter.tensors.metadata)


def data(path: Path) -> bytes:
    with reader.read(path) as adapter:
        assert adapter.tensors.data_start % 8 == 0
        return (path / TENSORS_NAME).read_bytes()[adapter.tensors.data_start :]


def load(path: Path) -> "dict[str, Tensor]":
    return parse_tensors((path / TENSORS_NAME).read_bytes())


def stamped(path: Path, base: Base) -> Imprint:
    made = imprint(path, base, Serving())
    assert made.outcome == "stamped"
    return made


def test_a_stamp_says_what_the_base_is_and_touches_no_tensor(credit: Path, base: Base) -> None:
    before, tensors, mode = metadata(credit), data(credit), (credit / TENSORS_NAME).stat().st_mode

    made = stamped(credit, base)

    assert data(credit) == tensors
    assert (credit / TENSORS_NAME).stat().st_mode == mode
    assert metadata(credit) == before | made.stamp.metadata()
    assert metadata(credit)["kite.norm_eps"] == "1e-05"
    assert metadata(credit)["kite.rope_theta"] == '{"full":10000.0}'
    assert metadata(credit)["kite.base"] == base.digest
    assert made.digest == reader.digest(credit) != made.report.digest
    assert sorted(path.name for path in credit.iterdir()) == [CONFIG_NAME, TENSORS_NAME]


def test_what_is_read_back_is_what_was_written(credit: Path, base: Base) -> None:
    assert stamp.parse(stamped(credit, base).stamp.metadata()) == (stamp.of(base, Serving()), [])


def test_the_library_that_vllm_uses_reads_the_same_tensors(credit: Path, base: Base) -> None:
    before = load(credit)
    stamped(credit, base)
    after = load(credit)
    assert after.keys() == before.keys()
    assert all(after[name].equal(before[name]) for name in before)


def test_the_same_stamp_again_changes_nothing(credit: Path, base: Base) -> None:
    stamped(credit, base)
    before = (credit / TENSORS_NAME).stat()

    assert imprint(credit, base, Serving()).outcome == "unchanged"

    after = (credit / TENSORS_NAME).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_newer_kite_does_not_stamp_again_for_its_name(credit: Path, base: Base) -> None:
    stamped(credit, base)
    rewrite(credit, lambda found: {**found, stamp.TOOL: "0.0.1"})
    assert imprint(credit, base, Serving()).outcome == "unchanged"


def test_other_servers_get_another_stamp_in_the_place_of_the_old(credit: Path, base: Base) -> None:
    first = stamped(credit, base).stamp
    second = imprint(credit, base, Serving(tp=2)).stamp
    assert second.layout_hash != first.layout_hash
    assert metadata(credit)[stamp.LAYOUT_HASH] == second.layout_hash


def test_a_dry_run_says_the_same_and_writes_nothing(credit: Path, base: Base) -> None:
    before = reader.digest(credit)
    tried = imprint(credit, base, Serving(), dry_run=True)
    assert reader.digest(credit) == before
    assert stamped(credit, base).stamp == tried.stamp


@pytest.mark.parametrize("defect", ["nan", "rank_lies", "wrong_prefix"])
def test_an_adapter_that_breaks_the_contract_is_not_stamped(defect: str, tmp_path: Path, base: Base) -> None:
    bad = zoo.defective(write_adapter(tmp_path / "good"), tmp_path / "bad", defect)
    before = (bad / TENSORS_NAME).read_bytes()

    made = imprint(bad, base, Serving())

    assert made.outcome == "refused"
    assert made.report.violations
    assert (bad / TENSORS_NAME).read_bytes() == before


def test_a_large_adapter_is_stamped_since_servers_are_asked_later(tmp_path: Path, base: Base) -> None:
    assert stamped(write_adapter(tmp_path / "wide", rank=24), base).report.rank == 24


def test_a_stamp_for_another_base_stays_unless_forced(credit: Path, base: Base, tmp_path: Path) -> None:
    other = Base.load(write_base(tmp_path / "other", seed=7))
    stamped(credit, other)
    before = reader.digest(credit)

    with pytest.raises(StampedForAnother, match=f"base {other.digest[:12]}, this one is {base.digest[:12]}"):
        imprint(credit, base, Serving())
    assert reader.digest(credit) == before

    assert imprint(credit, base, Serving(), force=True).outcome == "stamped"
    assert metadata(credit)[stamp.BASE] == base.digest


@pytest.mark.parametrize("moment", sorted(KILLED))
def test_a_killed_stamp_leaves_the_old_file_and_the_next_one_sweeps(moment: str, credit: Path, base: Base) -> None:
    before = reader.digest(credit)
    program = (
        f"import os, sys\n{KILLED[moment]}\nfrom pathlib import Path\nfrom kite_upcycle.rewrite import rewrite\n"
        "rewrite(Path(sys.argv[1]), lambda found: {**found, 'kite.note': 'x' * 4096})\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(credit)], check=False, capture_output=True, text=True)
    assert done.returncode < 0, done.stderr

    assert reader.digest(credit) == before
    assert any(path.name.startswith(TEMPORARY) for path in credit.iterdir())
    stamped(credit, base)
    assert sorted(path.name for path in credit.iterdir()) == [CONFIG_NAME, TENSORS_NAME]


def test_a_folder_that_cannot_be_written_is_said_and_left(credit: Path, base: Base) -> None:
    before = reader.digest(credit)
    program = (
        "import os, sys\nfrom pathlib import Path\nfrom kite_upcycle.rewrite import Unwritable, rewrite\n"
        "os.chdir(sys.argv[1])\n"
        "if os.geteuid() == 0: os.setgid(65_534); os.setuid(65_534)\n"  # root may write everywhere
        "try: rewrite(Path(), lambda found: {**found, 'a': 'b'})\n"
        "except Unwritable as error: print(error)\n"
    )
    credit.chmod(0o555)
    done = subprocess.run([sys.executable, "-c", program, str(credit)], check=True, capture_output=True, text=True)
    credit.chmod(0o755)

    assert done.stdout.strip() == "adapter . was not changed: Permission denied"
    assert reader.digest(credit) == before
    stamped(credit, base)


def test_two_writers_do_not_meet(credit: Path) -> None:
    def meanwhile(found: "dict[str, str]") -> dict[str, str]:
        with pytest.raises(Unwritable, match="another command"):
            rewrite(credit, lambda other: {**other, "second": "yes"})
        return {**found, "first": "yes"}

    rewrite(credit, lambda found: meanwhile(dict(found)))
    assert "second" not in metadata(credit)


def test_what_was_verified_is_what_is_stamped(credit: Path) -> None:
    verified = reader.digest(credit)
    write_adapter(credit, seed=9)
    with pytest.raises(Unwritable, match="meanwhile"):
        rewrite(credit, lambda found: {**found, "a": "b"}, digest=verified)


def test_a_stored_version_is_never_changed(credit: Path, base: Base) -> None:
    (credit / "manifest.json").write_text("{}")
    with pytest.raises(Unwritable, match="stored version"):
        imprint(credit, base, Serving())


def test_a_symlink_is_not_followed(credit: Path, tmp_path: Path) -> None:
    (credit / TENSORS_NAME).rename(tmp_path / "elsewhere")
    (credit / TENSORS_NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnreadableAdapter) as caught:
        rewrite(credit, lambda found: {**found, "a": "b"})
    assert [found.code for found in caught.value.violations] == [Code.SYMLINK]


def test_metadata_of_other_tools_stay(credit: Path, base: Base) -> None:
    rewrite(credit, lambda found: {**found, "trainer": "ours \u00fc"})
    stamped(credit, base)
    assert metadata(credit)["trainer"] == "ours \u00fc"


def test_the_header_stays_within_its_bound(credit: Path) -> None:
    with pytest.raises(Unwritable, match="header"):
        rewrite(credit, lambda found: {**found, "much": "x" * 2**24})
    assert not [path for path in credit.iterdir() if path.name.startswith(TEMPORARY)]


def test_kinds_of_layers_that_share_a_name_are_told_apart(base: Base) -> None:
    rotated = base.geometry.kinds[0]
    mixed = replace(base.geometry, kinds=(rotated, replace(rotated, rope=None)))
    assert list(stamp.rope_of(mixed)) == ["full", "full_1"]
    assert len(base.geometry.kinds) == TINY.layers
