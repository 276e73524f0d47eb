"""Blends, concatenated and recompressed, held against a dense float64 oracle: exact, in any order, the same bytes."""

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kite.errors import UsageError
from kite.testing import zoo
from kite_upcycle.base import Base
from kite_upcycle.blend import (
    DeviceAbsent,
    Member,
    MemberChanged,
    RankExceeded,
    ResidualExceeded,
    Unblendable,
    combine,
)
from kite_upcycle.reader import digest, read
from kite_upcycle.store import Store, served_name
from kite_upcycle.verify import Limits, verify

if TYPE_CHECKING:
    import torch

RELATIVE_ERROR_MAX = 1e-3
EXCESS_MAX = 1e-4  # beyond the best approximation
WIDE = Limits(max_lora_rank=512, params_share_max_ppm=100_000_000)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base.load(zoo.write_base(tmp_path_factory.mktemp("bases") / "tiny"))


@dataclass(frozen=True)
class Recipe:
    """One member as drawn: everything the scale of a module can depend on."""

    rank: int
    alpha: float
    weight_ppm: int
    rslora: bool = False
    dtype: str = "bfloat16"
    targets: tuple[str, ...] = zoo.ATTENTION
    ranks: tuple[tuple[str, int], ...] = ()
    alphas: tuple[tuple[str, float], ...] = ()

    def write(self, folder: Path, seed: int) -> Member:
        zoo.write_adapter(
            folder,
            rank=self.rank,
            targets=self.targets,
            dtype=self.dtype,
            seed=seed,
            ranks=dict(self.ranks),
            config={"lora_alpha": self.alpha, "use_rslora": self.rslora, "alpha_pattern": dict(self.alphas)},
        )
        return Member(folder, self.weight_ppm, digest(folder))

    def scale(self, leaf: str) -> float:
        rank = dict(self.ranks).get(leaf, self.rank)
        alpha = dict(self.alphas).get(leaf, self.alpha)
        return self.weight_ppm / 1_000_000 * alpha / (math.sqrt(rank) if self.rslora else rank)


def product(folder: Path, module: str) -> "torch.Tensor | None":
    with read(folder) as adapter:
        if zoo.key(module, "A") not in adapter.tensors.entries:
            return None
        a, b = (adapter.tensors.load(zoo.key(module, side)).double() for side in "AB")
        return b @ a


def oracle(recipes: Sequence[Recipe], members: Sequence[Member], module: str) -> "torch.Tensor":
    leaf = module.rsplit(".", 1)[-1]
    terms = [
        (recipe.scale(leaf), product(member.path, module)) for recipe, member in zip(recipes, members, strict=True)
    ]
    import torch

    return sum((scale * term for scale, term in terms if term is not None), torch.zeros(1, dtype=torch.float64))


def relative_error(folder: Path, recipes: Sequence[Recipe], members: Sequence[Member]) -> float:
    """Return the largest relative Frobenius error of any module."""
    targets = {leaf for recipe in recipes for leaf in recipe.targets}
    errors: list[float] = []
    for layer in range(zoo.TINY.layers):
        for leaf in targets:
            module = zoo.module_path(layer, leaf)
            expected, found = oracle(recipes, members, module), product(folder, module)
            assert found is not None
            errors.append(float(((found - expected).square().sum() / expected.square().sum()).sqrt()))
    return max(errors)


LEAVES = zoo.ATTENTION + zoo.FEED_FORWARD


@st.composite
def recipes(draw: st.DrawFn) -> list[Recipe]:
    count = draw(st.integers(1, 4))
    return [
        Recipe(
            rank=draw(st.integers(1, 8)),
            alpha=draw(st.one_of(st.integers(1, 64), st.floats(0.01, 100))),
            weight_ppm=draw(st.integers(10_000, 1_000_000 // count)),
            rslora=draw(st.booleans()),
            dtype=draw(st.sampled_from(["bfloat16", "float16", "float32"])),
            targets=tuple(draw(st.lists(st.sampled_from(LEAVES), min_size=1, max_size=4, unique=True))),
            ranks=tuple(draw(st.dictionaries(st.sampled_from(LEAVES), st.integers(1, 12), max_size=2)).items()),
            alphas=tuple(draw(st.dictionaries(st.sampled_from(LEAVES), st.integers(1, 32), max_size=2)).items()),
        )
        for _ in range(count)
    ]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=recipes(), seed=st.integers(0, 1_000))
def test_a_blend_is_the_weighted_sum_of_its_members_in_any_order(drawn: list[Recipe], seed: int, base: Base) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        members = [recipe.write(root / f"m{index}", seed + index) for index, recipe in enumerate(drawn)]
        for folder in ("forth", "back"):
            (root / folder).mkdir()

        blend = combine(members, root / "forth", base=base, max_lora_rank=512)
        combine(members[::-1], root / "back", base=base, max_lora_rank=512)

        assert relative_error(root / "forth", drawn, members) <= RELATIVE_ERROR_MAX
        assert digest(root / "forth") == digest(root / "back")
        report = verify(root / "forth", base, WIDE)
        assert report.accepted, report.violations
        assert (report.rank, report.parameters, report.share_ppm, report.modules) == (
            blend.rank,
            blend.parameters,
            blend.share_ppm,
            blend.modules,
        )


def test_one_whole_member_keeps_its_values(tmp_path: Path, base: Base) -> None:
    recipe = Recipe(rank=4, alpha=8, weight_ppm=1_000_000)  # scale 2: a power of two costs no rounding at all
    member = recipe.write(tmp_path / "m", 1)
    (tmp_path / "out").mkdir()
    assert combine([member], tmp_path / "out", base=base, max_lora_rank=4).rank == 4
    assert relative_error(tmp_path / "out", [recipe], [member]) < 1e-6


@pytest.mark.parametrize(
    ("alpha", "dtypes"),
    [(1e-7, {"F32"}), (1e-1, {"F16"}), (64, {"BF16", "F16"}), (1e9, {"F16"}), (1e20, {"F32"})],
)
def test_extreme_scales_stay_exact(alpha: float, dtypes: set[str], tmp_path: Path, base: Base) -> None:
    drawn = [Recipe(rank=2, alpha=alpha, weight_ppm=10_000), Recipe(rank=3, alpha=alpha, weight_ppm=900_000)]
    members = [recipe.write(tmp_path / str(index), index) for index, recipe in enumerate(drawn)]
    (tmp_path / "out").mkdir()
    combine(members, tmp_path / "out", base=base, max_lora_rank=8)
    assert relative_error(tmp_path / "out", drawn, members) <= RELATIVE_ERROR_MAX
    with read(tmp_path / "out") as adapter:
        assert {entry.dtype for entry in adapter.tensors.entries.values()} == dtypes


def test_a_scale_beyond_single_precision_is_refused(tmp_path: Path, base: Base) -> None:
    member = Recipe(rank=2, alpha=1e80, weight_ppm=1_000_000).write(tmp_path / "m", 1)
    with pytest.raises(Unblendable, match="no finite"):
        combine([member], tmp_path, base=base, max_lora_rank=8)


def test_members_with_different_modules_share_the_rank(tmp_path: Path, base: Base) -> None:
    drawn = [
        Recipe(rank=4, alpha=8, weight_ppm=500_000, targets=("q_proj",)),
        Recipe(rank=8, alpha=8, weight_ppm=500_000, targets=("v_proj", "down_proj")),
    ]
    members = [recipe.write(tmp_path / str(index), index) for index, recipe in enumerate(drawn)]
    (tmp_path / "out").mkdir()

    blend = combine(members, tmp_path / "out", base=base, max_lora_rank=8)

    assert (blend.rank, blend.modules, blend.residual_ppm) == (8, 6, 0)
    assert relative_error(tmp_path / "out", drawn, members) <= RELATIVE_ERROR_MAX
    with read(tmp_path / "out") as adapter:
        assert adapter.config["target_modules"] == ["down_proj", "q_proj", "v_proj"]
        assert adapter.config["lora_alpha"] == adapter.config["r"] == 8
        assert adapter.config["rank_pattern"] == adapter.config["alpha_pattern"] == {}
        assert {entry.dtype for entry in adapter.tensors.entries.values()} == {"BF16", "F16"}  # A as it was, B scaled


def test_an_adapter_of_some_layers_stays_in_them(tmp_path: Path, base: Base) -> None:
    zoo.write_adapter(tmp_path / "m", layers=[1], targets=["q_proj"])
    (tmp_path / "out").mkdir()
    combine([Member(tmp_path / "m", 1_000_000, digest(tmp_path / "m"))], tmp_path / "out", base=base, max_lora_rank=8)
    with read(tmp_path / "out") as adapter:
        assert adapter.config["target_modules"] == [zoo.module_path(1, "q_proj")]


def test_a_blend_is_readable_by_the_ordinary_library(tmp_path: Path, base: Base) -> None:
    member = Recipe(rank=3, alpha=5, weight_ppm=700_000, dtype="float32").write(tmp_path / "m", 1)
    (tmp_path / "out").mkdir()
    combine([member], tmp_path / "out", base=base, max_lora_rank=8)
    tensors = zoo.load_tensors(tmp_path / "out" / "adapter_model.safetensors")
    assert tensors[zoo.FIRST].shape == (3, zoo.TINY.hidden)


def test_too_high_a_rank_is_refused_with_what_would_help(tmp_path: Path, base: Base) -> None:
    members = [Recipe(rank=8, alpha=8, weight_ppm=1).write(tmp_path / str(seed), seed) for seed in range(3)]
    with pytest.raises(RankExceeded, match="rank 24, the servers hold 16") as caught:
        combine(members, tmp_path, base=base, max_lora_rank=16)
    for help_ in ("--max-lora-rank 32", "fewer members", "upcycle.residual_max_ppm"):
        assert help_ in caught.value.hint


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=recipes(), seed=st.integers(0, 1_000), rank=st.sampled_from([1, 8]))
def test_a_recompressed_blend_loses_what_it_says_and_no_more_than_the_best(
    drawn: list[Recipe], seed: int, rank: int, base: Base
) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        members = [recipe.write(root / f"m{index}", seed + index) for index, recipe in enumerate(drawn)]
        for folder in ("forth", "back"):
            (root / folder).mkdir()

        blend = combine(members, root / "forth", base=base, max_lora_rank=rank, residual_max_ppm=1_000_000)
        combine(members[::-1], root / "back", base=base, max_lora_rank=rank, residual_max_ppm=1_000_000)

        assert digest(root / "forth") == digest(root / "back")
        assert verify(root / "forth", base, WIDE).accepted
        total = lost = 0.0
        for module in modules_of(drawn):
            expected, found = oracle(drawn, members, module), product(root / "forth", module)
            assert found is not None
            best_error = tail(expected, rank)
            norm, error = norm_of(expected), norm_of(found - expected)
            recompressed = module in blend.residuals
            assert error <= best_error + (EXCESS_MAX if recompressed else RELATIVE_ERROR_MAX) * norm
            told_ppm = blend.residuals.get(module, 0)
            assert abs(told_ppm - 1e6 * best_error / norm) <= 2
            total, lost = total + norm**2, lost + best_error**2
        assert abs(blend.residual_ppm - 1e6 * math.sqrt(lost / total)) <= 2


def modules_of(drawn: Sequence[Recipe]) -> list[str]:
    leaves = {leaf for recipe in drawn for leaf in recipe.targets}
    return [zoo.module_path(layer, leaf) for layer in range(zoo.TINY.layers) for leaf in sorted(leaves)]


def tail(dense: "torch.Tensor", rank: int) -> float:
    """Return the Frobenius error of the best approximation of a rank."""
    values = np.linalg.svd(dense.numpy(), compute_uv=False)
    return float(np.sqrt(np.square(values[rank:]).sum()))


def norm_of(dense: "torch.Tensor") -> float:
    return float(dense.square().sum().sqrt())


def test_a_blend_that_would_lose_too_much_says_what_would_help(tmp_path: Path, base: Base) -> None:
    members = [Recipe(rank=8, alpha=8, weight_ppm=500_000).write(tmp_path / str(seed), seed) for seed in range(2)]
    with pytest.raises(ResidualExceeded, match="recompressed to rank 8 the blend loses") as caught:
        combine(members, tmp_path, base=base, max_lora_rank=8, residual_max_ppm=50_000)
    assert caught.value.residual_ppm > 50_000
    assert caught.value.enough == 16
    for help_ in ("--max-lora-rank 16", "fewer members", f"upcycle.residual_max_ppm to {caught.value.residual_ppm}"):
        assert help_ in caught.value.hint

    (tmp_path / "out").mkdir()
    made = combine(members, tmp_path / "out", base=base, max_lora_rank=8, residual_max_ppm=caught.value.residual_ppm)
    assert (made.method, made.rank, made.residual_ppm) == ("recompress", 8, caught.value.residual_ppm)
    manifest = made.manifest(base.digest)
    assert manifest.residuals == made.residuals
    assert max(made.residuals.values()) >= made.residual_ppm


def test_the_same_adapter_twice_fits_its_own_rank_again(tmp_path: Path, base: Base) -> None:
    recipe = Recipe(rank=4, alpha=8, weight_ppm=400_000)
    first = recipe.write(tmp_path / "a", 7)
    second = recipe.write(tmp_path / "b", 7)
    zoo.edit_config(second.path, revision="the same tensors under another digest")
    second = Member(second.path, 400_000, digest(second.path))
    (tmp_path / "out").mkdir()
    made = combine([first, second], tmp_path / "out", base=base, max_lora_rank=4, residual_max_ppm=0)
    assert (made.method, made.rank, made.residual_ppm) == ("recompress", 4, 0)
    assert relative_error(tmp_path / "out", [recipe, recipe], [first, second]) <= EXCESS_MAX


def test_a_device_that_is_not_there_is_refused(tmp_path: Path, base: Base) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    member = Recipe(rank=4, alpha=8, weight_ppm=500_000).write(tmp_path / "m", 1)
    with pytest.raises(DeviceAbsent):
        combine([member], tmp_path, base=base, max_lora_rank=8, device="cuda")


def test_impossible_members_are_refused(tmp_path: Path, base: Base) -> None:
    member = Recipe(rank=4, alpha=8, weight_ppm=500_000).write(tmp_path / "m", 1)
    other = Recipe(rank=4, alpha=8, weight_ppm=500_001).write(tmp_path / "o", 2)
    for wrong in ([], [member, member], [member, other], [Member(member.path, 0, member.digest)]):
        with pytest.raises(UsageError):
            combine(wrong, tmp_path, base=base, max_lora_rank=16)

    zoo.edit_config(member.path, lora_alpha=9)
    with pytest.raises(MemberChanged):
        combine([member], tmp_path, base=base, max_lora_rank=16)


@pytest.mark.parametrize("name", ["smaller_sibling", "int8", "no_b", "dora", "wrong_prefix"])
def test_an_unverified_member_is_refused(name: str, tmp_path: Path, base: Base) -> None:
    folder = zoo.write_adapter(tmp_path / "m")
    zoo.DEFECTS[name].spoil(folder)
    with pytest.raises(Unblendable):
        combine([Member(folder, 1_000_000, digest(folder))], tmp_path, base=base, max_lora_rank=16)


def test_a_blend_goes_into_the_store_and_comes_out_as_one_version(tmp_path: Path, base: Base) -> None:
    drawn = [Recipe(rank=4, alpha=8, weight_ppm=600_000), Recipe(rank=4, alpha=16, weight_ppm=300_000, rslora=True)]
    members = [recipe.write(tmp_path / str(index), index) for index, recipe in enumerate(drawn)]
    store = Store(tmp_path / "store")

    version = store.put(lambda folder: combine(members, folder, base=base, max_lora_rank=16).manifest(base.digest))
    again = store.put(lambda folder: combine(members[::-1], folder, base=base, max_lora_rank=16).manifest(base.digest))

    assert again == version
    assert {record.digest: record.weight_ppm for record in version.manifest.members} == {
        member.digest: member.weight_ppm for member in members
    }
    assert version.manifest.rank == 8
    assert verify(version.path, base, WIDE).digest == version.digest
    assert served_name("risk", version.digest).startswith("risk@")
    assert relative_error(version.path, drawn, members) <= RELATIVE_ERROR_MAX
