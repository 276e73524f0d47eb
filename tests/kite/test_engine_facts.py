"""What a server tells of itself: all in its development mode, some by its metrics, and nothing is made up."""

import pytest

from kite.engine import Engine, EngineAnswer, EngineProcess, Facts
from kite.engine.facts import read_base, with_config, with_labels

LISTED = {"data": [{"id": "tiny", "root": "/bases/tiny"}, {"id": "risk", "root": "/adapters/risk"}]}


async def test_the_running_server_tells_its_limits(fake_server: EngineProcess) -> None:
    async with Engine(fake_server.url) as engine:
        facts = await engine.facts()
    assert facts == Facts("tiny", max_lora_rank=16, kv_dtype="auto", block_size=32, tp=1, pp=1)


def test_the_development_mode_tells_everything() -> None:
    config = {
        "lora_config": {"max_lora_rank": 64, "max_loras": 4},
        "cache_config": {"block_size": 16, "cache_dtype": "fp8"},
        "parallel_config": {"tensor_parallel_size": 2, "pipeline_parallel_size": 4},
    }
    answer = {"vllm_config": config, "vllm_env": {"VLLM_KV_CACHE_LAYOUT": "HND"}}
    expected = Facts(
        "tiny", "/bases/tiny", max_lora_rank=64, kv_dtype="fp8", block_size=16, kv_layout="HND", tp=2, pp=4
    )
    assert with_config(read_base(LISTED), answer) == expected


@pytest.mark.parametrize(
    "answer", [None, [], "text", {}, {"vllm_config": "a text"}, {"vllm_config": {"lora_config": None}}]
)
def test_what_is_not_told_is_unknown(answer: object) -> None:
    assert with_config(Facts("tiny"), answer) == Facts("tiny")


def test_a_number_that_is_none_is_unknown() -> None:
    odd = {"lora_config": {"max_lora_rank": True}, "cache_config": {"block_size": "16", "cache_dtype": 8}}
    assert with_config(Facts("tiny"), {"vllm_config": odd}) == Facts("tiny")


def test_labels_tell_the_cache() -> None:
    page = '# HELP x\nvllm:cache_config_info{block_size="128",cache_dtype="auto",note="a \\"b\\", c"} 1.0\nother 1\n'
    assert with_labels(Facts("tiny"), page) == Facts("tiny", kv_dtype="auto", block_size=128)
    assert with_labels(Facts("tiny"), "") == Facts("tiny")


@pytest.mark.parametrize("answer", [None, {}, {"data": []}, {"data": ["tiny"]}, {"data": [{"name": "tiny"}]}])
def test_a_list_of_models_in_another_form_is_an_error(answer: object) -> None:
    with pytest.raises(EngineAnswer):
        read_base(answer)
