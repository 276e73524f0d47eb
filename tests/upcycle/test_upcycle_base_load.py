"""Bases load with the module paths of their weights, fused or not, and only if configuration and weights agree."""

import json
from pathlib import Path

import pytest

from kite_upcycle.base import Base, UnreadableBase
from kite_upcycle.strict import JSON

Shapes = dict[str, tuple[int, ...]]
SMALL: dict[str, JSON] = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}


def write(folder: Path, config: dict[str, JSON], shapes: Shapes) -> Path:
    """Write a base of zeros, bf16: 8 bytes of length, the header, the data."""
    folder.mkdir()
    start, header = 0, dict[str, JSON]()
    for name, shape in shapes.items():
        size = 2
        for axis in shape:
            size *= axis
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, start + size]}
        start += size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(start))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def layered(pattern: str, leaves: Shapes) -> Shapes:
    return {f"{pattern.format(layer)}.{leaf}.weight": shape for layer in range(2) for leaf, shape in leaves.items()}


def test_phi_3_has_fused_attention_and_fused_feed_forward(tmp_path: Path) -> None:
    leaves: Shapes = {
        "self_attn.qkv_proj": (32 + 2 * 16, 32),
        "self_attn.o_proj": (32, 32),
        "mlp.gate_up_proj": (96, 32),
        "mlp.down_proj": (32, 48),
        "input_layernorm": (32,),
    }
    config = SMALL | {"model_type": "phi3", "num_key_value_heads": 2}
    base = Base.load(write(tmp_path / "base", config, layered("model.layers.{}", leaves)))
    assert base.modules["model.layers.1.self_attn.qkv_proj"] == (64, 32)
    assert base.modules["model.layers.0.mlp.gate_up_proj"] == (96, 32)
    assert (base.layers, base.head_dim, len(base.modules)) == (2, 8, 8)
    assert base.geometry.k_out == 16


def test_neox_has_one_module_for_queries_keys_and_values(tmp_path: Path) -> None:
    leaves: Shapes = {
        "attention.query_key_value": (96, 32),
        "attention.dense": (32, 32),
        "mlp.dense_h_to_4h": (128, 32),
        "mlp.dense_4h_to_h": (32, 128),
    }
    config = SMALL | {"model_type": "gpt_neox", "rotary_pct": 0.25}
    base = Base.load(write(tmp_path / "base", config, layered("gpt_neox.layers.{}", leaves)))
    assert base.modules["gpt_neox.layers.1.attention.query_key_value"] == (96, 32)
    assert (base.geometry.family, base.layers, base.head_dim) == ("gpt_neox", 2, 8)


def test_falcon_shares_one_head_of_keys_and_values(tmp_path: Path) -> None:
    leaves: Shapes = {"self_attention.query_key_value": (32 + 2 * 8, 32), "self_attention.dense": (32, 32)}
    config = SMALL | {"model_type": "falcon", "multi_query": True}
    base = Base.load(write(tmp_path / "base", config, layered("transformer.h.{}", leaves)))
    assert base.modules["transformer.h.0.self_attention.query_key_value"] == (48, 32)
    assert base.geometry.kv_heads == 1


def test_a_multimodal_base_is_measured_by_its_language_model(tmp_path: Path) -> None:
    shapes = layered("language_model.model.layers.{}", {"self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32)})
    shapes |= layered("vision_tower.vision_model.encoder.layers.{}", {"self_attn.q_proj": (24, 24)})
    config: dict[str, JSON] = {
        "model_type": "llava",
        "text_config": SMALL | {"model_type": "llama", "num_key_value_heads": 2},
        "vision_config": {"hidden_size": 24, "num_attention_heads": 3},
    }
    base = Base.load(write(tmp_path / "base", config, shapes))
    assert (base.layers, base.head_dim, base.geometry.kv_heads) == (2, 8, 2)
    assert len(base.modules) == 6


@pytest.mark.parametrize(
    ("changes", "module"),
    [({"head_dim": 16}, "self_attn.q_proj"), ({"num_key_value_heads": 4}, "self_attn.k_proj")],
)
def test_a_configuration_that_its_weights_contradict_is_refused(
    tmp_path: Path, changes: dict[str, JSON], module: str
) -> None:
    shapes = layered("model.layers.{}", {"self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32)})
    config = SMALL | {"model_type": "llama", "num_key_value_heads": 2} | changes
    with pytest.raises(UnreadableBase, match=f"model.layers.0.{module}"):
        Base.load(write(tmp_path / "base", config, shapes))


def test_infinity_in_a_configuration_is_named_with_the_folder(tmp_path: Path) -> None:
    config = SMALL | {"model_type": "llama", "rope_theta": float("inf")}
    folder = write(tmp_path / "base", config, layered("model.layers.{}", {"self_attn.q_proj": (32, 32)}))
    with pytest.raises(UnreadableBase, match=r"base .*/base cannot be read: config.json: rope_theta is no finite"):
        Base.load(folder)
