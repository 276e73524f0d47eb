"""The torch reference computes what transformers computes, and applies adapters as the formula says."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

import pytest
import torch
from torch import Tensor

from kite.testing import adapters, bases, llama

PROMPTS = ([5], [72, 101, 108, 108, 111], list(range(1, 60)))


class Output(Protocol):
    """What a transformers model returns."""

    logits: Tensor


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bases.tiny(tmp_path_factory.mktemp("bases"))


@pytest.fixture
def adapter(tmp_path: Path, tiny: Path) -> Path:
    return adapters.adapter(tmp_path / "adapter", tiny)


def largest(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


@pytest.mark.vllm
def test_it_agrees_with_transformers_on_every_position(tiny: Path):
    transformers = import_module("transformers")
    peer = cast("Callable[..., Output]", transformers.LlamaForCausalLM.from_pretrained(tiny, dtype=torch.float32))
    reference = llama.Llama.load(tiny)
    with torch.inference_mode():
        for ids in PROMPTS:
            assert largest(reference.logits(ids), peer(input_ids=torch.tensor([ids])).logits[0]) < 1e-3


def test_next_token_logprobs_are_those_of_the_last_position(tiny: Path):
    model = llama.Llama.load(tiny)
    found = llama.next_token_logprobs(tiny, PROMPTS)
    for ids, logprobs in zip(PROMPTS, found, strict=True):
        assert logprobs.shape == (32_000,)
        assert abs(logprobs.exp().sum().item() - 1) < 1e-4
        assert largest(logprobs, model.logits(ids)[-1].log_softmax(-1)) < 1e-4


def test_later_tokens_do_not_change_earlier_logits(tiny: Path):
    model = llama.Llama.load(tiny)
    assert largest(model.logits([9, 8, 7]), model.logits([9, 8, 7, 6, 5])[:3]) < 1e-4


def test_a_merged_weight_is_the_base_plus_weight_times_scale_times_b_times_a(tiny: Path, adapter: Path):
    name = "model.layers.1.self_attn.q_proj"
    tensors = llama.tensors(adapter / "adapter_model.safetensors")
    a, b = (tensors[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    base = llama.Llama.load(tiny)
    expected = base.weights[f"{name}.weight"] + 0.3 * (8 / 4) * (b @ a)
    assert largest(base.merged([(adapter, 0.3)]).weights[f"{name}.weight"], expected) < 1e-6
    assert base.weights.keys() == base.merged([(adapter, 0.3)]).weights.keys()


def test_two_members_add_up_in_either_order(tiny: Path, tmp_path: Path, adapter: Path):
    other = adapters.adapter(tmp_path / "other", tiny, seed=1, rank=8)
    base = llama.Llama.load(tiny)
    forth, back = (
        base.logits([1, 2], [(adapter, 0.7), (other, 0.3)]),
        base.logits([1, 2], [(other, 0.3), (adapter, 0.7)]),
    )
    assert largest(forth, back) < 1e-3
    assert largest(forth, base.logits([1, 2])) > 0.1


def test_rslora_divides_by_the_root_of_the_rank():
    assert llama.lora_scale({"r": 4, "lora_alpha": 8}) == 2.0
    assert llama.lora_scale({"r": 4, "lora_alpha": 8, "use_rslora": True}) == 4.0


def test_what_it_does_not_compute_it_refuses():
    with pytest.raises(llama.UnsupportedModel, match="use_dora"):
        llama.lora_scale({"r": 4, "lora_alpha": 8, "use_dora": True})
    with pytest.raises(llama.UnsupportedModel, match="llama3"):
        llama.rope_theta({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}})


def test_rope_theta_is_read_nested_before_flat_before_default():
    assert llama.rope_theta({"rope_parameters": {"rope_theta": 100_000.0}, "rope_theta": 1.0}) == 100_000.0
    assert llama.rope_theta({"rope_theta": 500_000}) == 500_000.0
    assert llama.rope_theta({}) == 10_000.0


def test_a_missing_base_or_adapter_is_named(tmp_path: Path, tiny: Path):
    with pytest.raises(llama.MissingPath, match="no safetensors"):
        llama.Llama.load(tmp_path)
    with pytest.raises(llama.MissingPath, match=r"adapter_config\.json"):
        llama.next_token_logprobs(tiny, [[1]], [(tmp_path / "nowhere", 1.0)])
