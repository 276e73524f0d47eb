"""What the guard computes, held against torch in float64: over the same parts, and over the whole vocabulary."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pytest

from kite import probes
from kite.engine import Distribution, Engine
from kite.proof import kl_nats, read_pair
from kite.proof.divergence import covered
from kite.proof.micrologs import read as from_integers
from kite.proof.micrologs import written
from kite.testing.engine import BASE_NAME, Adapters
from kite.testing.llama import Llama

if TYPE_CHECKING:
    from torch import Tensor

Read = Callable[[Llama], "list[Tensor]"]
Logprobs = Sequence["Tensor"]

EXACT_NATS = 1e-6
ENGINE_REL = 1e-5  # float32 in the engine; measured 3e-7
TOP = 20
VERSION = "credit@0123456789ab"


@pytest.fixture(scope="module")
def models(tiny_model: Llama, tiny_adapters: Adapters, read: Read) -> dict[str, Logprobs]:
    """What four models give after each probe: the base, two adapters, and one of them at most of its strength."""
    merged = {
        "base": [],
        "good": [(tiny_adapters.good, 1.0)],
        "most": [(tiny_adapters.good, 0.9)],
        "other": [(tiny_adapters.other, 1.0)],
    }
    return {name: read(tiny_model.merged(found)) for name, found in merged.items()}


PAIRS = [("good", "base"), ("base", "good"), ("good", "most"), ("most", "good"), ("good", "other"), ("good", "good")]


def union(p: "Tensor", q: "Tensor") -> list[int]:
    return sorted({int(token) for side in (p, q) for token in side.topk(TOP).indices})


def parts(side: "Tensor", tokens: list[int]) -> "Tensor":
    """Return the log-probabilities of the tokens and, last, of all others together, from the others themselves."""
    import torch

    others = torch.ones(len(side), dtype=torch.bool)
    others[tokens] = False
    return torch.cat((side[tokens], side[others].logsumexp(0, keepdim=True)))


def divergence(p: "Tensor", q: "Tensor") -> float:
    return float((p.exp() * (p - q)).sum())


def listed(side: "Tensor", tokens: list[int]) -> Distribution:
    return Distribution({token: float(side[token]) for token in tokens})


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_over_the_same_parts_it_is_what_torch_computes(models: dict[str, Logprobs], first: str, second: str) -> None:
    for p, q in zip(models[first], models[second], strict=True):
        tokens = union(p, q)
        reference = divergence(parts(p, tokens), parts(q, tokens))
        assert kl_nats(listed(p, tokens), listed(q, tokens)) == pytest.approx(reference, abs=EXACT_NATS)


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_it_never_exceeds_the_divergence_over_the_vocabulary(
    models: dict[str, Logprobs], first: str, second: str
) -> None:
    """And covers most of it where the tokens have most of the mass."""
    for p, q in zip(models[first], models[second], strict=True):
        tokens = union(p, q)
        bound, whole = kl_nats(listed(p, tokens), listed(q, tokens)), divergence(p, q)
        assert bound <= whole + EXACT_NATS
        if covered(listed(p, tokens), listed(q, tokens)) > 0.8:
            assert bound > whole / 2 - EXACT_NATS


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_integers_on_the_way_cost_a_millionth(models: dict[str, Logprobs], first: str, second: str) -> None:
    for p, q in zip(models[first], models[second], strict=True):
        tokens = union(p, q)
        sides = [listed(side, tokens) for side in (p, q)]
        travelled = [from_integers(written(side)) for side in sides]
        assert kl_nats(*travelled) == pytest.approx(kl_nats(*sides), abs=EXACT_NATS, rel=EXACT_NATS)


async def test_read_from_engines_it_is_the_same(
    sides: tuple[Engine, Engine], tiny_adapters: Adapters, models: dict[str, Logprobs]
) -> None:
    first, second = sides
    await first.load(VERSION, str(tiny_adapters.good))
    await second.load(VERSION, str(tiny_adapters.other))
    found = await read_pair(first, VERSION, second, VERSION, probes.default().prompts)
    alike = await read_pair(first, BASE_NAME, second, BASE_NAME, probes.default().prompts)
    pairs = list(zip(models["good"], models["other"], strict=True))
    over_parts = [divergence(parts(p, union(p, q)), parts(q, union(p, q))) for p, q in pairs]
    whole = [divergence(p, q) for p, q in pairs]
    count = len(pairs)
    assert found.kl_micronats / 1e6 == pytest.approx(sum(over_parts) / count, rel=ENGINE_REL)
    assert found.kl_micronats / 1e6 <= sum(whole) / count + EXACT_NATS
    assert found.p99_micronats / 1e6 == pytest.approx(max(over_parts), rel=ENGINE_REL)
    assert (alike.kl_micronats, alike.p99_micronats) == (0, 0)
