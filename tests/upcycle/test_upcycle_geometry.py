"""The attention of a base, read from the layouts in which each family really writes its config.json.

The files in `bases/` are ours: the real field names and sizes of a family, with few layers.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import pytest

from kite_upcycle.families import FAMILIES, SAME
from kite_upcycle.geometry import Geometry, LayerKind, Rope, geometry
from kite_upcycle.strict import JSON, parse_object

if TYPE_CHECKING:
    from torch import Tensor

BASES = Path(__file__).parent / "bases"
NAMES = sorted(path.stem for path in BASES.glob("*.json"))
THETA = Rope(10_000.0, defaulted=False, scaling="")
MILLION = Rope(1_000_000.0, defaulted=False, scaling="")

LEAVES = frozenset({"q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "q_a_proj", "q_b_proj"}) | {
    "kv_a_proj_with_mqa",
    "kv_b_proj",
}
# family, layers, heads, kv heads, head dim, v head dim, MLA ranks, hidden, q, k, v out, qkv bias, qk norm, eps, field
EXPECTED: dict[str, tuple[object, ...]] = {
    "deepseek_v2": (
        *("deepseek_v2", 4, 16, 16, 192, 128, (512, 0), 2048, 3072, 3072, 2048),
        *(False, False, 1e-6, "rms_norm_eps"),
    ),
    "deepseek_v3": (
        *("deepseek_v3", 4, 128, 128, 192, 128, (512, 1536), 7168, 24576, 24576, 16384),
        *(False, False, 1e-6, "rms_norm_eps"),
    ),
    "falcon_40b": ("falcon", 4, 128, 8, 64, 64, None, 8192, 8192, 512, 512, False, False, 1e-5, "layer_norm_epsilon"),
    "falcon_7b": ("falcon", 4, 71, 1, 64, 64, None, 4544, 4544, 64, 64, False, False, 1e-5, "layer_norm_epsilon"),
    "falcon_first": (
        *("RefinedWeb", 4, 128, 8, 64, 64, None, 8192, 8192, 512, 512),
        *(False, False, 1e-5, "layer_norm_epsilon"),
    ),
    "falcon_rw": ("falcon", 4, 32, 32, 64, 64, None, 2048, 2048, 2048, 2048, True, False, 1e-5, "layer_norm_epsilon"),
    "gemma2": ("gemma2", 4, 8, 4, 256, 256, None, 2304, 2048, 1024, 1024, False, False, 1e-6, "rms_norm_eps"),
    "gemma3": ("gemma3_text", 8, 4, 1, 256, 256, None, 1152, 1024, 256, 256, False, True, 1e-6, "rms_norm_eps"),
    "gemma3_multimodal": ("gemma3_text", 8, 8, 4, 256, 256, None, 2560, 2048, 1024, 1024, False, True, 1e-6, ""),
    "gemma3_nested": ("gemma3_text", 8, 4, 1, 256, 256, None, 1152, 1024, 256, 256, False, True, 1e-6, "rms_norm_eps"),
    "gpt_neox": ("gpt_neox", 4, 8, 8, 256, 256, None, 2048, 2048, 2048, 2048, True, False, 1e-5, "layer_norm_eps"),
    "llama2": ("llama", 4, 32, 32, 128, 128, None, 4096, 4096, 4096, 4096, False, False, 1e-5, "rms_norm_eps"),
    "llama3": ("llama", 4, 32, 8, 64, 64, None, 2048, 2048, 512, 512, False, False, 1e-5, "rms_norm_eps"),
    "llama3_nested": ("llama", 4, 32, 8, 64, 64, None, 2048, 2048, 512, 512, False, False, 1e-5, "rms_norm_eps"),
    "llama4": ("llama4_text", 8, 40, 8, 128, 128, None, 5120, 5120, 1024, 1024, False, True, 1e-5, "rms_norm_eps"),
    "llava": ("llama", 32, 32, 32, 128, 128, None, 4096, 4096, 4096, 4096, False, False, 1e-5, "rms_norm_eps"),
    "mistral": ("mistral", 4, 32, 8, 128, 128, None, 4096, 4096, 1024, 1024, False, False, 1e-5, "rms_norm_eps"),
    "mistral_nemo": ("mistral", 4, 32, 8, 128, 128, None, 5120, 4096, 1024, 1024, False, False, 1e-5, "rms_norm_eps"),
    "mixtral": ("mixtral", 4, 32, 8, 128, 128, None, 4096, 4096, 1024, 1024, False, False, 1e-5, "rms_norm_eps"),
    "phi3": ("phi3", 4, 32, 32, 96, 96, None, 3072, 3072, 3072, 3072, False, False, 1e-5, "rms_norm_eps"),
    "qwen2": ("qwen2", 4, 14, 2, 64, 64, None, 896, 896, 128, 128, True, False, 1e-6, "rms_norm_eps"),
    "qwen2_5": ("qwen2", 4, 28, 4, 128, 128, None, 3584, 3584, 512, 512, True, False, 1e-6, "rms_norm_eps"),
    "qwen3": ("qwen3", 4, 16, 8, 128, 128, None, 1024, 2048, 1024, 1024, False, True, 1e-6, "rms_norm_eps"),
}


def config_of(name: str, **changes: JSON) -> dict[str, JSON]:
    return parse_object((BASES / f"{name}.json").read_bytes()) | changes


def read(name: str, **changes: JSON) -> Geometry:
    return geometry(config_of(name, **changes))


def _plain(found: Geometry) -> Geometry:
    """Drop whether a file says something or leaves it to the family."""
    kinds = tuple(
        replace(kind, rope=None if kind.rope is None else replace(kind.rope, defaulted=False)) for kind in found.kinds
    )
    return replace(found, kinds=kinds, defaulted=(), norm_eps_field="")


def scaling_of(kind: LayerKind) -> Mapping[str, JSON]:
    assert kind.rope is not None
    return parse_object(kind.rope.scaling.encode())


@pytest.mark.parametrize("name", NAMES)
def test_the_sizes_of_each_family_are_read_from_its_own_layout(name: str) -> None:
    found = read(name)
    names = [field.name for field in fields(Geometry) if field.name not in {"kinds", "known", "defaulted"}]
    assert {field: getattr(found, field) for field in names} == dict(zip(names, EXPECTED[name], strict=True))
    assert (len(found.kinds), found.known) == (found.layers, True)


def test_llama_2_leaves_theta_to_its_family_and_that_is_said() -> None:
    assert set(read("llama2").kinds) == {LayerKind("full", None, Rope(10_000.0, defaulted=True, scaling=""))}


def test_llama_3_reads_the_same_with_flat_and_with_nested_rope() -> None:
    found = read("llama3")
    assert found == read("llama3_nested")
    assert found.kinds[0].rope is not None
    assert (found.kinds[0].rope.theta, found.kinds[0].rope.defaulted) == (500_000.0, False)
    assert scaling_of(found.kinds[0]) == {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192.0,
        "rope_type": "llama3",
    }


def test_the_nested_theta_comes_before_the_flat_one() -> None:
    found = read("llama2", rope_theta=20_000, rope_parameters={"rope_type": "default", "rope_theta": 30_000})
    assert found.kinds[0].rope == Rope(30_000.0, defaulted=False, scaling="")


def test_qwen_has_a_window_only_where_it_is_switched_on_and_in_later_layers() -> None:
    assert set(read("qwen2").kinds) == {LayerKind("full", None, MILLION)}
    found = read("qwen2_5")
    assert [(kind.name, kind.window) for kind in found.kinds] == [("full", None)] * 3 + [("sliding", 131_072)]
    assert scaling_of(found.kinds[0]) == {
        "factor": 4.0,
        "original_max_position_embeddings": 32_768.0,
        "rope_type": "yarn",
    }


def test_qwen_3_takes_a_head_dim_that_is_not_hidden_size_over_heads() -> None:
    config = config_of("qwen3")
    assert set(geometry(config).kinds) == {LayerKind("full", None, MILLION)}
    del config["head_dim"]
    assert (geometry(config).head_dim, geometry(config).defaulted) == (128, ("head_dim",))


def test_mistral_slides_in_all_layers_unless_the_window_is_null() -> None:
    assert set(read("mistral").kinds) == {LayerKind("sliding", 4096, THETA)}
    assert set(read("mistral", sliding_window=None).kinds) == {LayerKind("full", None, THETA)}
    assert set(read("mistral_nemo").kinds) == {LayerKind("full", None, MILLION)}
    assert set(read("mixtral").kinds) == {LayerKind("full", None, MILLION)}


def test_gemma_2_alternates() -> None:
    sliding, full = LayerKind("sliding", 4096, THETA), LayerKind("full", None, THETA)
    assert read("gemma2").kinds == (sliding, full, sliding, full)


def test_gemma_3_turns_its_two_kinds_of_layers_differently() -> None:
    sliding, full = LayerKind("sliding", 512, THETA), LayerKind("full", None, MILLION)
    found = read("gemma3")
    assert found.kinds == (*[sliding] * 5, full, sliding, sliding)
    assert found == read("gemma3_nested")


def test_what_a_multimodal_configuration_leaves_out_is_taken_from_the_family_and_said() -> None:
    found = read("gemma3_multimodal")
    assert found.defaulted == ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
    assert found.kinds[0] == LayerKind("sliding", 1024, Rope(10_000.0, defaulted=True, scaling=""))
    assert found.kinds[5].rope == Rope(1_000_000.0, defaulted=True, scaling='{"factor":8.0,"rope_type":"linear"}')
    assert read("llava").defaulted == ("num_hidden_layers", "hidden_size", "num_attention_heads")


def test_a_nested_part_without_a_name_is_of_the_family_of_the_whole() -> None:
    config = config_of("gemma3_multimodal")
    del cast("dict[str, JSON]", config["text_config"])["model_type"]
    assert geometry(config) == read("gemma3_multimodal")


def test_llama_4_sees_chunks_where_it_turns_and_everything_where_it_does_not() -> None:
    kinds = read("llama4").kinds
    assert [(kind.name, kind.window, kind.rope is None) for kind in kinds[:4]] == [("chunked", 8192, False)] * 3 + [
        ("full", None, True)
    ]
    assert kinds[4:] == kinds[:4]


def test_phi_3_counts_from_the_length_that_stands_beside_its_factors() -> None:
    (kind,) = set(read("phi3").kinds)
    scaling = scaling_of(kind)
    assert (kind.name, kind.window) == ("sliding", 262_144)
    assert (scaling["rope_type"], scaling["original_max_position_embeddings"]) == ("longrope", 4096.0)
    assert len(cast("list[JSON]", scaling["long_factor"])) == 48
    old = cast("dict[str, JSON]", config_of("phi3")["rope_scaling"]) | {"type": "su"}
    assert read("phi3", rope_scaling=old) == read("phi3")


def test_deepseek_caches_one_latent_vector_and_one_rotated_part() -> None:
    for name in ("deepseek_v2", "deepseek_v3"):
        (kind,) = set(read(name).kinds)
        assert (kind.name, kind.window) == ("mla", None)
        assert scaling_of(kind)["qk_rope_head_dim"] == 64.0
    assert read("deepseek_v3", kv_lora_rank=256) != read("deepseek_v3")


def test_neox_turns_a_quarter_of_each_head_by_a_base_of_another_name() -> None:
    part = Rope(10_000.0, defaulted=False, scaling='{"partial_rotary_factor":0.25}')
    assert set(read("gpt_neox").kinds) == {LayerKind("full", None, part)}
    assert read("gpt_neox", rotary_emb_base=20_000).kinds[0].rope == replace(part, theta=20_000.0)
    assert read("gpt_neox", rotary_pct=1.0).kinds[0].rope == THETA


def test_falcon_turns_unless_it_has_alibi() -> None:
    assert set(read("falcon_7b").kinds) == {LayerKind("full", None, Rope(10_000.0, defaulted=True, scaling=""))}
    assert set(read("falcon_rw").kinds) == {LayerKind("full", None, None)}
    assert read("falcon_7b", model_type="RefinedWebModel").kv_heads == 1


def test_an_unknown_family_is_read_by_the_general_names_and_that_is_said() -> None:
    config: dict[str, JSON] = {
        "model_type": "never_seen",
        "n_layer": 2,
        "d_model": 64,
        "num_heads": 4,
        "norm_epsilon": 1e-5,
        "use_qkv_bias": True,
        "qk_layernorm": True,
        "layer_types": ["linear_attention", "sliding_attention"],
        "sliding_window": 32,
    }
    found = geometry(config)
    assert (found.family, found.known, found.defaulted) == ("never_seen", False, ())
    assert (found.layers, found.hidden, found.heads, found.kv_heads, found.head_dim) == (2, 64, 4, 4, 16)
    assert (found.qkv_bias, found.qk_norm, found.norm_eps, found.norm_eps_field) == (True, True, 1e-5, "norm_epsilon")
    assert found.kinds == (
        LayerKind("linear", None, None),
        LayerKind("sliding", 32, Rope(10_000.0, defaulted=True, scaling="")),
    )


def test_every_other_name_leads_to_a_family() -> None:
    assert set(SAME.values()) <= set(FAMILIES)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "falcon_first"])  # not in transformers any more
def test_transformers_classes_and_models_say_the_same(name: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    text, rows, biased, normed = _as_transformers(config_of(name))
    found = read(name)
    assert _plain(geometry(text)) == _plain(found), "what transformers saves reads differently"
    rotated = 64 if found.mla_ranks else 0  # DeepSeek's class calls this part of a head its head_dim
    assert (text.get("head_dim") or found.head_dim) == (rotated or found.head_dim)
    if found.family != "falcon":  # whose class does not say what multi_query makes of the number
        assert text.get("num_key_value_heads", found.heads) == found.kv_heads
    assert [kind.rope.theta for kind in found.kinds if kind.rope is not None] == _thetas(text, found)
    expected = _rows(found, rotated)
    assert rows
    assert rows == {leaf: expected[leaf] for leaf in rows}
    assert (biased, normed) == (found.qkv_bias, found.qk_norm)


class _Text(Protocol):
    num_hidden_layers: int

    def get_text_config(self) -> "_Text": ...
    def to_json_string(self) -> str: ...


class _Model(Protocol):
    def named_parameters(self) -> Iterable[tuple[str, "Tensor"]]: ...
    def named_modules(self) -> Iterable[tuple[str, object]]: ...


def _as_transformers(config: dict[str, JSON]) -> tuple[dict[str, JSON], dict[str, int], bool, bool]:
    """Return what transformers saves of a configuration; of its first layer the rows of q, k and v, bias and norms."""
    import torch

    library = import_module("transformers")
    library.logging.set_verbosity_error()
    given = {name: config[name] for name in config if name not in {"architectures", "model_type"}}
    text = cast("_Text", library.AutoConfig.for_model(config["model_type"], **given)).get_text_config()
    saved = cast("dict[str, JSON]", json.loads(text.to_json_string()))
    text.num_hidden_layers = 1
    with torch.device("meta"):
        model = cast("_Model", library.AutoModelForCausalLM.from_config(text))
    rows = {path.split(".")[-2]: len(tensor) for path, tensor in model.named_parameters() if path.endswith(".weight")}
    biased = {path.split(".")[-2] for path, _ in model.named_parameters() if path.endswith(".bias")}
    modules = {path.split(".")[-1] for path, _ in model.named_modules()}
    return (
        saved,
        {leaf: rows[leaf] for leaf in LEAVES & set(rows)},
        not LEAVES.isdisjoint(biased),
        not {"q_norm", "k_norm", "qk_norm"}.isdisjoint(modules),
    )


def _rows(found: Geometry, rotated: int) -> dict[str, int]:
    ranks = found.mla_ranks or (0, 0)
    fused = found.q_out + found.k_out + found.v_out
    return {
        "q_proj": found.q_out,
        "k_proj": found.k_out,
        "v_proj": found.v_out,
        "qkv_proj": fused,
        "query_key_value": fused,
        "q_a_proj": ranks[1],
        "q_b_proj": found.q_out,
        "kv_a_proj_with_mqa": ranks[0] + rotated,
        "kv_b_proj": found.k_out - found.heads * rotated + found.v_out,
    }


def _thetas(text: dict[str, JSON], found: Geometry) -> list[JSON]:
    ropes = cast("dict[str, JSON]", text["rope_parameters"])
    named = [ropes.get(f"{kind.name}_attention", ropes) for kind in found.kinds if kind.rope is not None]
    return [cast("dict[str, JSON]", rope)["rope_theta"] for rope in named]
