"""The bases and adapters that everything else is tested with are what they claim to be."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
from tokenizers import Tokenizer
from torch import Tensor

from kite.errors import UsageError
from kite.testing import adapters, bases, zoo
from kite.testing.llama import Llama, tensors

SHARE_MAX_PPM = 8_000
EFFECT_MIN_NATS = 0.1
PROMPTS = ("x", "Hello, world", "Überweisung: 9 400 € in bar 💶", "a" * 100)
EXAMPLES = Path(__file__).parents[2] / "examples" / "adapters"
EXAMPLE_BYTES_MAX = 2_000_000


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bases.tiny(tmp_path_factory.mktemp("bases"))


@pytest.fixture
def good(tmp_path: Path, tiny: Path) -> Path:
    return adapters.adapter(tmp_path / "good", tiny)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def share_ppm(adapter: Path, base: Path) -> int:
    sizes = [sum(t.numel() for t in tensors(file).values()) for file in (adapter_file(adapter), base / MODEL)]
    return sizes[0] * 1_000_000 // sizes[1]


MODEL = "model.safetensors"


def adapter_file(adapter: Path) -> Path:
    return adapter / "adapter_model.safetensors"


def encode(base: Path, text: str) -> list[int]:
    return Tokenizer.from_file(str(base / "tokenizer.json")).encode(text).ids


def kl_nats(p: Tensor, q: Tensor) -> float:
    return (p.exp() * (p - q)).sum().item()


def test_the_tiny_base_is_the_same_bytes_every_time_and_kept(tmp_path: Path, tiny: Path):
    again = bases.tiny(tmp_path)
    assert contents(again) == contents(tiny)
    (again / "mark").touch()
    assert (bases.tiny(tmp_path) / "mark").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == [again.name]


def test_any_text_becomes_tokens_and_comes_back(tiny: Path):
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 32_000
    for text in PROMPTS:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_next_tokens_of_the_tiny_base_are_neither_flat_nor_certain(tiny: Path):
    model = Llama.load(tiny)
    for text in PROMPTS:
        logprobs = model.next_logprobs(encode(tiny, text))
        assert 0.5 < -(logprobs.exp() * logprobs).sum().item() < 6.0
        assert 0.02 < logprobs.exp().max().item() < 0.95
        assert logprobs.exp().topk(20).values.sum().item() > 0.8  # enough for two instances to be compared


def test_an_adapter_changes_every_next_token_and_stays_within_the_limit(tiny: Path, good: Path):
    base, changed = Llama.load(tiny), Llama.load(tiny).merged([(good, 1.0)])
    assert share_ppm(good, tiny) < SHARE_MAX_PPM
    for text in PROMPTS:
        ids = encode(tiny, text)
        assert kl_nats(base.next_logprobs(ids), changed.next_logprobs(ids)) > EFFECT_MIN_NATS


def test_equal_arguments_give_an_equal_adapter_and_seeds_differ(tmp_path: Path, tiny: Path, good: Path):
    assert contents(adapters.adapter(tmp_path / "same", tiny)) == contents(good)
    assert contents(adapters.adapter(tmp_path / "other", tiny, seed=1)) != contents(good)


def test_nothing_is_written_over(tmp_path: Path, tiny: Path, good: Path):
    with pytest.raises(UsageError, match="exists"):
        adapters.adapter(good, tiny)
    with pytest.raises(UsageError, match="pickle"):
        zoo.defective(good, tmp_path / "bad", "pickle")


@pytest.mark.parametrize("kind", zoo.DEFECTS)
def test_each_defect_is_one_and_leaves_the_good_adapter_alone(tmp_path: Path, good: Path, kind: str):
    before = contents(good)
    bad = zoo.defective(good, tmp_path / kind, kind)
    assert contents(good) == before
    assert contents(bad) != before
    assert contents(bad).keys() == before.keys()


def test_the_defects_show_where_they_should(tmp_path: Path, tiny: Path, good: Path):
    bad = {kind: zoo.defective(good, tmp_path / kind, kind) for kind in zoo.DEFECTS}
    base, ids = Llama.load(tiny), encode(tiny, "Hello")
    assert base.merged([(bad["nan"], 1.0)]).next_logprobs(ids).isnan().any()
    assert base.merged([(bad["wrong_prefix"], 1.0)]).next_logprobs(ids).equal(base.next_logprobs(ids))
    assert rank(bad["rank_lies"]) == 2 * tensor_rank(bad["rank_lies"])
    assert query_rows(bad["wrong_base"]) == 2 * query_rows(good)
    assert share_ppm(bad["too_large"], tiny) > SHARE_MAX_PPM
    same = base.merged([(bad["too_large"], 1.0)]).next_logprobs(ids), base.merged([(good, 1.0)]).next_logprobs(ids)
    assert kl_nats(*same) < 1e-3


def rank(adapter: Path) -> int:
    return cast("int", json.loads((adapter / "adapter_config.json").read_text())["r"])


def tensor_rank(adapter: Path) -> int:
    return min(min(tensor.shape) for tensor in tensors(adapter_file(adapter)).values())


def query_rows(adapter: Path) -> int:
    return next(t.shape[0] for key, t in tensors(adapter_file(adapter)).items() if key.endswith("q_proj.lora_B.weight"))


@pytest.mark.parametrize("task", ["credit", "laundering"])
def test_the_example_adapters_are_small_and_within_the_limit(task: str):
    files = contents(EXAMPLES / task)
    assert files.keys() == {"adapter_config.json", "adapter_model.safetensors"}
    assert sum(map(len, files.values())) <= EXAMPLE_BYTES_MAX
    assert len(held_out(task)) >= 16


def held_out(task: str) -> Sequence[dict[str, object]]:
    return [json.loads(line) for line in (EXAMPLES / f"{task}.jsonl").read_text().splitlines()]


@pytest.mark.vllm
@pytest.mark.parametrize("task", ["credit", "laundering"])
def test_the_example_adapters_know_their_task_and_the_base_does_not(task: str):
    base = Llama.load(bases.smollm2(bases.cache()))
    assert right(base, task) < 0.4
    assert right(base.merged([(EXAMPLES / task, 1.0)]), task) >= 0.85


def right(model: Llama, task: str) -> float:
    tokens = Tokenizer.from_file(str(bases.smollm2(bases.cache()) / "tokenizer.json"))
    cases = held_out(task)[:16]
    hits = [model.next_logprobs(tokens.encode(str(c["prompt"])).ids).argmax().item() == c["answer_id"] for c in cases]
    return sum(hits) / len(cases)
