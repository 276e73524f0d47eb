"""What each family of models takes for granted where its config.json is silent: facts of their configuration classes.

The values are those of transformers 5 (`configuration_*.py`), whose classes the engine reads a base with.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

LATER_LAYERS = 28  # Qwen: `max_window_layers`, where absent


@dataclass(frozen=True)
class Family:
    """The silent part of a family's layout.

    `eps`: field and value. `sizes`: layers, hidden size, heads; a text configuration that is nested in a multimodal one
    leaves out what equals them. `kv_heads`: None is one per query head; `multi_query` (one for all) and `grouped` (not
    that) are Falcon's switches. `head_dim`: None is hidden size / heads, and `head_dim_derived` says that it cannot be
    set. `theta`: None is no rotary embedding; `local_theta` is that of sliding layers. `rotated`: share of a head.
    `window`: tokens; `full_every`: each n-th layer sees everything, all others the window; `late_window`: a window must
    be switched on and holds for later layers. `unrotated_every`: each n-th layer has no rotary embedding. `qkv_bias`,
    `qk_norm`: the field, none if it is fixed, and the value.
    """

    eps: tuple[str, float | None] = ("rms_norm_eps", 1e-6)
    sizes: tuple[int, int, int] | None = None
    kv_heads: int | None = None
    multi_query: bool = False
    grouped: bool = False
    head_dim: int | None = None
    head_dim_derived: bool = False
    theta: float | None = 10_000.0
    local_theta: float | None = None
    rotated: float = 1.0
    window: int | None = None
    full_every: int = 0
    late_window: bool = False
    unrotated_every: int = 0
    mla: bool = False
    qkv_bias: tuple[str | None, bool] = (None, False)
    qk_norm: tuple[str | None, bool] = (None, False)


_SWITCHED_BIAS = ("attention_bias", False)
_MLA = Family(mla=True, qkv_bias=_SWITCHED_BIAS)
_GEMMA = Family(sizes=(28, 3072, 16), kv_heads=16, head_dim=256, qkv_bias=_SWITCHED_BIAS)
_FALCON = Family(eps=("layer_norm_epsilon", 1e-5), multi_query=True, head_dim_derived=True, qkv_bias=("bias", False))
_GPT_2 = Family(eps=("layer_norm_epsilon", 1e-5), theta=None, head_dim_derived=True, qkv_bias=(None, True))

FAMILIES: Mapping[str, Family] = {
    "llama": Family(sizes=(32, 4096, 32), qkv_bias=_SWITCHED_BIAS),
    "llama4_text": Family(
        eps=("rms_norm_eps", 1e-5),
        sizes=(48, 5120, 40),
        kv_heads=8,
        head_dim=128,
        theta=500_000.0,
        window=8192,
        unrotated_every=4,
        qkv_bias=_SWITCHED_BIAS,
        qk_norm=("use_qk_norm", True),
    ),
    "mistral": Family(sizes=(32, 4096, 32), kv_heads=8, window=4096),
    "mixtral": Family(eps=("rms_norm_eps", 1e-5), sizes=(32, 4096, 32), kv_heads=8, theta=1_000_000.0),
    "qwen2": Family(sizes=(32, 4096, 32), kv_heads=32, window=4096, late_window=True, qkv_bias=(None, True)),
    "qwen2_moe": Family(sizes=(24, 2048, 16), kv_heads=16, window=4096, late_window=True, qkv_bias=("qkv_bias", True)),
    "qwen3": Family(
        sizes=(32, 4096, 32),
        kv_heads=32,
        head_dim=128,
        window=4096,
        late_window=True,
        qkv_bias=_SWITCHED_BIAS,
        qk_norm=(None, True),
    ),
    "qwen3_moe": Family(
        sizes=(24, 2048, 32),
        kv_heads=4,
        window=4096,
        late_window=True,
        qkv_bias=_SWITCHED_BIAS,
        qk_norm=(None, True),
    ),
    "gemma": _GEMMA,
    "gemma2": Family(sizes=(26, 2304, 8), kv_heads=4, head_dim=256, window=4096, full_every=2, qkv_bias=_SWITCHED_BIAS),
    "gemma3_text": Family(
        sizes=(26, 2304, 8),
        kv_heads=4,
        head_dim=256,
        theta=1_000_000.0,
        local_theta=10_000.0,
        window=4096,
        full_every=6,
        qkv_bias=_SWITCHED_BIAS,
        qk_norm=(None, True),
    ),
    "phi3": Family(eps=("rms_norm_eps", 1e-5), sizes=(32, 3072, 32)),
    "phi": Family(eps=("layer_norm_eps", 1e-5), rotated=0.5, qkv_bias=(None, True), qk_norm=("qk_layernorm", False)),
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "gpt_neox": Family(
        eps=("layer_norm_eps", 1e-5), head_dim_derived=True, rotated=0.25, qkv_bias=("attention_bias", True)
    ),
    "falcon": _FALCON,
    "RefinedWeb": replace(_FALCON, grouped=True),  # the first 40B: grouped by its name alone, as vLLM reads it
    "gpt2": _GPT_2,
    "bloom": _GPT_2,
    "opt": Family(eps=("layer_norm_eps", 1e-5), theta=None, head_dim_derived=True, qkv_bias=("enable_bias", True)),
}
# Older or outer names of the same layouts; the outer ones hold where a nested configuration does not name its own.
SAME: Mapping[str, str] = {
    "RefinedWebModel": "falcon",
    "kimi_k2": "deepseek_v3",
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "mistral3": "mistral",
}
UNKNOWN = Family(eps=("rms_norm_eps", None))


def family_of(name: str) -> Family:
    """Return what is known of a family, or what holds for most.

    >>> family_of("mixtral").theta, family_of("never_seen") is UNKNOWN
    (1000000.0, True)
    """
    return FAMILIES.get(SAME.get(name, name), UNKNOWN)
