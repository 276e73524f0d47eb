"""The zoo against the contract: each defect is refused with exactly its codes, nothing sound is refused."""

from pathlib import Path

import pytest

from kite.errors import UsageError
from kite.testing import zoo
from kite_upcycle import codes, lora
from kite_upcycle.codes import Stage
from kite_upcycle.stamp import Demand
from kite_upcycle.verify import Limits, Report, verify
from kite_upcycle.violations import Code


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return Stage.build(tmp_path_factory.mktemp("stage"))


def said(report: Report) -> str:
    return "\n".join(map(str, report.violations))


@pytest.mark.parametrize("name", zoo.ANIMALS)
def test_a_defect_is_refused_with_exactly_its_codes(name: str, tmp_path: Path, stage: Stage) -> None:
    report = stage.show(name, tmp_path / "root")
    assert {found.code for found in report.violations} == zoo.ANIMALS[name].codes, said(report)
    assert all(line.isprintable() for line in said(report).splitlines())


@pytest.mark.parametrize("name", zoo.SOUND)
def test_what_is_sound_raises_no_false_alarm(name: str, tmp_path: Path, stage: Stage) -> None:
    report = verify(zoo.SOUND[name](tmp_path / name), stage.base, Limits(zoo.MAX_LORA_RANK, 10**6))
    assert report.accepted, said(report)
    assert report.modules > 0
    assert report.parameters > 0


def test_every_code_has_an_animal() -> None:
    shown = {code for animal in zoo.ANIMALS.values() for code in animal.codes}
    assert set(Code) - shown == {Code.FILE_CHANGED}  # no file at rest shows it: test_upcycle_hostile.py
    assert shown <= set(Code)


def test_every_code_has_an_animal_that_shows_it_alone() -> None:
    alone = {code for animal in zoo.ANIMALS.values() if len(animal.codes) == 1 for code in animal.codes}
    assert set(Code) - alone == {Code.FILE_CHANGED, Code.MORE}  # the last counts what is left out


def test_every_field_that_changes_the_arithmetic_has_a_defect() -> None:
    shown = {name.removeprefix("with_") for name in zoo.DEFECTS if name.startswith("with_")}
    assert shown == {*lora.UNSUPPORTED, "bias"}


def test_a_sound_one_passes_on_the_stage(stage: Stage) -> None:
    assert verify(stage.plain, stage.base, stage.limits).accepted
    strict = verify(stage.stamped, stage.base, stage.limits, demand=Demand(strict=True))
    assert strict.accepted, said(strict)


def test_the_page_of_codes_is_as_generated() -> None:
    assert (Path(__file__).parents[2] / codes.PAGE).read_text() == codes.page()


def test_every_code_has_a_meaning() -> None:
    assert set(codes.MEANINGS) == set(Code)


def test_a_defect_goes_into_a_new_folder_only(tmp_path: Path, stage: Stage) -> None:
    with pytest.raises(UsageError, match="exists"):
        zoo.defective(stage.plain, stage.plain, "nan")
    with pytest.raises(UsageError, match="no defect is called"):
        zoo.defective(stage.plain, tmp_path / "new", "hungry")
