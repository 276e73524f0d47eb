"""How a running server is set up, as far as it tells. Pure functions.

vLLM tells all of it at `/server_info`, in its development mode only, in which KITE runs its engines. Without, the size
of a block and the dtype of the cache stand among the labels of a metric, and the highest rank is nowhere.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

from kite.engine.errors import EngineAnswer

_INFO = re.compile(r"^vllm:cache_config_info\{(?P<labels>.*)\} ", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Facts:
    """What a server said of itself; None is what it did not say.

    `base` is its served name, `root` the folder of the base on the server's machine, `block_size` in tokens,
    `kv_dtype` "auto" when the cache has the base's, `tp` and `pp` the sizes of tensor and pipeline parallelism.
    """

    base: str
    root: str | None = None
    max_lora_rank: int | None = None
    kv_dtype: str | None = None
    block_size: int | None = None
    kv_layout: str | None = None
    tp: int | None = None
    pp: int | None = None


def read_base(answer: object) -> Facts:
    """Read the base from a list of models, where it is the first. Raises EngineAnswer."""
    try:
        first = cast("list[Mapping[str, object]]", cast("Mapping[str, object]", answer)["data"])[0]
        return Facts(base=str(first["id"]), root=_text(first.get("root")))
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise EngineAnswer("the list of models has another form") from error


def with_config(facts: Facts, answer: object) -> Facts:
    """Add what the development mode tells, from `/server_info?config_format=json`."""
    config, env = _part(answer, "vllm_config"), _part(answer, "vllm_env")
    cache, parallel = _part(config, "cache_config"), _part(config, "parallel_config")
    return replace(
        facts,
        max_lora_rank=_count(_part(config, "lora_config").get("max_lora_rank")),
        kv_dtype=_text(cache.get("cache_dtype")),
        block_size=_count(cache.get("block_size")),
        kv_layout=_text(env.get("VLLM_KV_CACHE_LAYOUT")),
        tp=_count(parallel.get("tensor_parallel_size")),
        pp=_count(parallel.get("pipeline_parallel_size")),
    )


def with_labels(facts: Facts, page: str) -> Facts:
    """Add what the labels of a metric tell, from a page of Prometheus text.

    >>> page = 'vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0"} 1.0'
    >>> with_labels(Facts("tiny"), page)  # doctest: +ELLIPSIS
    Facts(base='tiny', root=None, max_lora_rank=None, kv_dtype='auto', block_size=16, ...)
    """
    match = _INFO.search(page)
    labels: dict[str, str] = dict(_LABEL.findall(match["labels"])) if match else {}
    size = labels.get("block_size", "")
    return replace(facts, kv_dtype=labels.get("cache_dtype"), block_size=int(size) if size.isdecimal() else None)


def _part(answer: object, name: str) -> Mapping[str, object]:
    """Return an object inside an object, empty where there is none: another version may tell less."""
    part = cast("Mapping[str, object]", answer).get(name) if isinstance(answer, dict) else None
    return cast("Mapping[str, object]", part) if isinstance(part, dict) else {}


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
