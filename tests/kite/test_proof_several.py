"""Several models read at once: each pair as if it had been read alone, whatever else was in the run."""

from pathlib import Path

import pytest

from kite import probes
from kite.engine import Distribution
from kite.proof import agreement_ppm, apart, count_right, likeliest, read_pair, read_several
from kite.proof.several import PROMPTS_PER_CALL
from kite.testing.engine import Adapters
from kite.testing.reference import Reference

PROMPTS = probes.default().prompts[: PROMPTS_PER_CALL + 1]
WEIGHTS = (1.0, 0.7, -0.7, -1.0)


@pytest.fixture
def reference(tiny_base: Path, tiny_adapters: Adapters) -> Reference:
    """The base and eight models, which together hold more tokens likely than one read can name."""
    models = {f"good {w}": [(tiny_adapters.good, w)] for w in WEIGHTS}
    models |= {f"other {w}": [(tiny_adapters.other, w)] for w in WEIGHTS}
    return Reference.load(tiny_base, {"base": (), **models})


async def test_a_pair_is_read_as_if_alone(reference: Reference):
    models, heard = await reference.models(), dict[str, int]()

    def told(model: str, prompts: int) -> None:
        heard[model] = heard.get(model, 0) + prompts

    read = await read_several(reference, models, PROMPTS, told)
    assert heard == dict.fromkeys(models, 2 * len(PROMPTS))
    assert max(len(found.logprobs) for found in read["base"].exact) > 128
    for model in models:
        assert apart(read["base"], read[model]) == await read_pair(reference, "base", reference, model, PROMPTS)
    assert apart(read["base"], read["base"]).kl_micronats == 0


async def test_agreement_and_right_answers_count_the_likeliest_token(reference: Reference):
    models = ("base", "good 1.0", "other 1.0")
    read = await read_several(reference, models, PROMPTS)
    best = {model: [likeliest(found) for found in read[model].exact] for model in models}
    for model in models:
        alike = sum(mine == theirs for mine, theirs in zip(best["base"], best[model], strict=True))
        assert agreement_ppm(read["base"], read[model]) == alike * 1_000_000 // len(PROMPTS)
        assert await count_right(reference, model, PROMPTS, best["base"]) == alike
    assert likeliest(Distribution({7: -1.0, 3: -1.0, 9: -2.0})) == 3
