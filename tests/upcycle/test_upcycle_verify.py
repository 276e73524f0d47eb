"""The contract: what a report says, and against what. Each defect alone is in test_upcycle_zoo.py."""

import json
from pathlib import Path

import pytest

from kite.errors import MissingPath
from kite.testing import zoo
from kite_upcycle.base import Base, UnreadableBase
from kite_upcycle.stamp import NO_STAMP
from kite_upcycle.verify import Limits, Report, share_ppm, verify
from kite_upcycle.violations import MAX_VIOLATIONS, Code

WIDE = Limits(max_lora_rank=16, params_share_max_ppm=1_000_000)  # adapters are large beside a tiny base


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base.load(zoo.write_base(tmp_path_factory.mktemp("bases") / "tiny"))


def codes(report: Report) -> set[str]:
    return {found.code for found in report.violations}


def test_a_sound_adapter_is_accepted_and_measured(tmp_path: Path, base: Base) -> None:
    folder = zoo.write_adapter(tmp_path / "credit", config={"base_model_name_or_path": "somewhere/tiny"})

    report = verify(folder, base, WIDE)

    assert report.accepted, report.violations
    per_layer = sum(4 * sum(zoo.TINY.features(leaf)) for leaf in zoo.ATTENTION)
    assert report.parameters == per_layer * zoo.TINY.layers
    assert report.share_ppm == share_ppm(report.parameters, base)
    assert (report.rank, report.modules, report.notes) == (4, 8, (NO_STAMP,))
    assert report.digest is not None
    assert len(report.digest) == 64


def test_rank_and_share_are_bounded_by_the_limits(tmp_path: Path, base: Base) -> None:
    folder = zoo.write_adapter(tmp_path / "large", rank=16)

    assert codes(verify(folder, base, Limits(8, 1_000_000))) == {Code.RANK_LIMIT}
    share = verify(folder, base, WIDE).share_ppm
    assert codes(verify(folder, base, Limits(16, share))) == set()
    assert codes(verify(folder, base, Limits(16, share - 1))) == {Code.PARAMS_SHARE}


def test_all_violations_are_reported_at_once(tmp_path: Path, base: Base) -> None:
    folder = zoo.write_adapter(tmp_path / "wreck")
    names = ["nan", "half_lost", "with_use_dora", "classifier", "deeper_base"]
    for name in names:
        zoo.DEFECTS[name].spoil(folder)

    report = verify(folder, base, Limits(2, 1))

    limits = {Code.RANK_LIMIT, Code.PARAMS_SHARE}
    assert codes(report) == limits.union(*(zoo.DEFECTS[name].codes for name in names))


def test_the_tensors_are_checked_even_when_the_configuration_is_unreadable(tmp_path: Path, base: Base) -> None:
    folder = zoo.write_adapter(tmp_path / "wreck")
    zoo.DEFECTS["nan"].spoil(folder)
    (folder / "adapter_config.json").write_text("{")

    assert codes(verify(folder, base, WIDE)) == {Code.CONFIG_JSON, Code.NOT_FINITE}


def test_an_adapter_of_another_base_names_the_layers_whose_heads_differ(tmp_path: Path) -> None:
    ours = zoo.Shape(layers=13, hidden=56, heads=28, kv_heads=4, intermediate=8, vocabulary=8)
    theirs = zoo.Shape(layers=13, hidden=64, heads=32, kv_heads=8, intermediate=8, vocabulary=8)
    base = Base.load(zoo.write_base(tmp_path / "base", ours))
    folder = zoo.write_adapter(tmp_path / "theirs", theirs, targets=["q_proj", "k_proj"])

    report = verify(folder, base, WIDE)

    lines = [str(found) for found in report.violations]
    assert "KV cache alignment mismatch at layer 12: adapter 32 heads, base 28" in lines
    assert "KV cache alignment mismatch at layer 12: adapter 8 key/value heads, base 4" in lines
    assert codes(report) == {Code.ATTENTION_HEADS, Code.SHAPE}  # its hidden size differs as well


def test_the_recorded_name_of_the_base_is_only_a_note(tmp_path: Path, base: Base) -> None:
    report = verify(zoo.write_adapter(tmp_path / "a", config={"base_model_name_or_path": "org/other-7b"}), base, WIDE)
    assert report.accepted
    assert "org/other-7b" in report.notes[0]


def test_a_report_stays_bounded(tmp_path: Path, base: Base) -> None:
    deep = zoo.Shape(layers=300)
    report = verify(zoo.write_adapter(tmp_path / "deep", deep, rank=1), base, WIDE)
    assert len(report.violations) == MAX_VIOLATIONS + 1
    assert report.violations[-1].code == Code.MORE


def test_base_counts_tied_embeddings_once_and_reads_shards(tmp_path: Path) -> None:
    whole = zoo.write_base(tmp_path / "whole")
    one = Base.load(whole)
    tensors = zoo.load_tensors(whole / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    names = sorted(tensors)
    split = tmp_path / "split"
    split.mkdir()
    (split / "config.json").write_bytes((whole / "config.json").read_bytes())
    zoo.save_tensors({name: tensors[name] for name in names[::2]}, split / "model-1.safetensors")
    zoo.save_tensors({name: tensors[name] for name in names[1::2]}, split / "model-2.safetensors")
    weight_map = {name: f"model-{1 + index % 2}.safetensors" for index, name in enumerate(names)}
    (split / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    two = Base.load(split)

    assert two.parameters == one.parameters == sum(t.numel() for n, t in tensors.items() if n != "lm_head.weight")
    assert {**two.modules, "lm_head": ()} == {**one.modules, "lm_head": ()}
    assert two.digest != one.digest == Base.load(whole).digest


def test_what_is_no_base_says_so(tmp_path: Path) -> None:
    with pytest.raises(MissingPath, match="not a folder"):
        Base.load(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnreadableBase, match="index"):
        Base.load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x80\x04pickle")
    with pytest.raises(UnreadableBase, match="header_size"):
        Base.load(tmp_path)
