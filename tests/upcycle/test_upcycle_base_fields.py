"""A base's config.json is taken at its word only where the word is clear: all else is refused by the field's name."""

import random
from pathlib import Path

import pytest

from kite_upcycle.fields import UnreadableBase
from kite_upcycle.geometry import geometry
from kite_upcycle.strict import JSON, parse_object

BASES = Path(__file__).parent / "bases"
NAMES = sorted(path.stem for path in BASES.glob("*.json"))
SEED = 20_26


def config_of(name: str, **changes: JSON) -> dict[str, JSON]:
    return parse_object((BASES / f"{name}.json").read_bytes()) | changes


def floats(value: JSON) -> JSON:
    """Write whole numbers as 32.0, as other tools do."""
    if isinstance(value, dict):
        return {name: floats(item) for name, item in value.items()}
    if isinstance(value, list):
        return [floats(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def shuffled(value: JSON, source: random.Random) -> JSON:
    if not isinstance(value, dict):
        return value
    names = source.sample(sorted(value), len(value))
    return {name: shuffled(value[name], source) for name in names}


def refused(config: dict[str, JSON]) -> str:
    with pytest.raises(UnreadableBase) as caught:
        geometry(config)
    return caught.value.reason


@pytest.mark.parametrize("name", NAMES)
def test_neither_the_spelling_of_whole_numbers_nor_the_order_of_keys_matters(name: str) -> None:
    config, source = config_of(name), random.Random(SEED)  # noqa: S311 - a repeatable order, no secret
    for variant in (floats(config), shuffled(config, source), floats(shuffled(config, source))):
        assert isinstance(variant, dict)
        assert geometry(variant) == geometry(config), f"seed {SEED}"


@pytest.mark.parametrize("name", [name for name in NAMES if name not in {"gemma3_multimodal", "llava"}])
def test_a_required_field_that_is_missing_is_named(name: str) -> None:
    required = ({"num_hidden_layers", "n_layer"}, {"hidden_size"}, {"num_attention_heads", "n_head"})
    whole = config_of(name)
    if "text_config" in whole:
        return  # leaves out what it likes: test_upcycle_geometry
    for aliases in required:
        rest = {field: value for field, value in whole.items() if field not in aliases}
        assert max(aliases) in refused(rest)


@pytest.mark.parametrize("field", ["kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"])
def test_mla_needs_all_its_sizes(field: str) -> None:
    config = config_of("deepseek_v3")
    del config[field]
    assert f"{field} is missing" in refused(config)


def test_an_unknown_family_must_give_its_eps() -> None:
    config = config_of("llama2", model_type="never_seen")
    del config["rms_norm_eps"]
    assert "rms_norm_eps or layer_norm_eps or layer_norm_epsilon" in refused(config)
    assert "rms_norm_eps is 1e-05, but norm_eps is 1e-06" in refused(config | {"rms_norm_eps": 1e-5, "norm_eps": 1e-6})


WRONG = [True, "32", float("nan"), float("inf"), -1, 0, 10**400, [32], {"value": 32}]


@pytest.mark.parametrize("value", WRONG, ids=repr)
@pytest.mark.parametrize(
    "field",
    ["num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "rope_theta"],
)
def test_what_is_no_number_above_zero_is_refused_by_the_name_of_its_field(field: str, value: JSON) -> None:
    assert f"config.json: {field} " in refused(config_of("llama2", **{field: value}))


@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_so_it_is_in_every_nested_layout(value: JSON) -> None:
    nested: dict[str, JSON] = {"full_attention": {"rope_theta": value}, "sliding_attention": {"rope_theta": 1e4}}
    found = refused(config_of("gemma3_nested", rope_parameters=nested))
    assert "rope_parameters.full_attention.rope_theta" in found
    assert "rope_parameters.rope_theta" in refused(config_of("llama3_nested", rope_parameters={"rope_theta": value}))
    assert "rope_local_base_freq" in refused(config_of("gemma3", rope_local_base_freq=value))
    assert "rotary_emb_base" in refused(config_of("gpt_neox", rotary_emb_base=value))
    inner = config_of("llama4")["text_config"]
    assert isinstance(inner, dict)
    assert "text_config.head_dim" in refused({"model_type": "llama4", "text_config": inner | {"head_dim": value}})


@pytest.mark.parametrize("value", [True, "8", float("nan"), float("inf"), -1])
def test_factors_of_scaling_are_numbers(value: JSON) -> None:
    scaling: JSON = {"rope_type": "linear", "factor": value}
    assert "rope_scaling.factor" in refused(config_of("llama2", rope_scaling=scaling))


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("falcon_7b", {"head_dim": 128}, "head_dim is 128, but hidden size 4544 has 71 heads"),
        ("gpt_neox", {"head_dim": 64}, "head_dim is 64"),
        ("llama2", {"num_attention_heads": 24, "num_key_value_heads": 8}, "head_dim is missing"),
        ("llama2", {"num_key_value_heads": 5}, "num_key_value_heads is 5"),
        ("llama2", {"n_head": 16}, "num_attention_heads is 32, but n_head is 16"),
        ("deepseek_v3", {"head_dim": 100}, "head_dim is 100"),
        ("deepseek_v3", {"qk_head_dim": 100}, "qk_head_dim is 100"),
        ("llama2", {"num_hidden_layers": 10**6}, "num_hidden_layers must be a whole number from 1 to 4096"),
        ("llama2", {"hidden_size": 4096.5}, "hidden_size must be a whole number"),
        ("gemma3_nested", {"layer_types": ["full_attention"]}, "layer_types must be 8 names"),
        ("llama4", {"text_config": "gemma"}, "text_config is no object"),
        ("qwen2", {"use_sliding_window": "yes"}, "use_sliding_window is no boolean"),
        ("qwen2_5", {"max_window_layers": -1}, "max_window_layers must be a whole number"),
        ("llama3", {"rope_parameters": {"rope_theta": 1e4}}, "rope_scaling and rope_parameters are both given"),
        ("llama3", {"rope_scaling": ["llama3"]}, "rope_scaling is no object"),
        ("llama2", {"model_type": 7}, "model_type is no string"),
    ],
)
def test_what_contradicts_itself_is_refused(name: str, changes: dict[str, JSON], reason: str) -> None:
    assert reason in refused(config_of(name, **changes))


def test_eps_keeps_its_last_bit() -> None:
    """GGUF files carry eps as float32: a real base has 9.999999747378752e-06 where its origin has 1e-05."""
    assert geometry(config_of("llama2", rms_norm_eps=9.999999747378752e-06)) != geometry(config_of("llama2"))
    assert geometry(config_of("llama2", rms_norm_eps=1e-5 + 1e-8)) != geometry(config_of("llama2"))
