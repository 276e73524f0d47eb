"""`adapter_config.json`: which fields PEFT writes, which of them KITE can honour, and the scale of each module.

Fields are those of PEFT 0.20's `LoraConfig` and `PeftConfig`. What changes the arithmetic in a way that neither the
blend nor vLLM carries is refused when truthy, never ignored.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kite_upcycle.strict import JSON
from kite_upcycle.violations import Code, Violation, violation

MAX_RANK = 4_096
MAX_PATTERNS = 4_096
MAX_PATTERN_CHARS = 256
# Patterns are regular expressions of a stranger: few wildcards and no repeated groups keep matching polynomial.
MAX_WILDCARDS_PER_PATTERN = 2
MAX_WILDCARDS = 8
ALL_LINEAR = "all-linear"
_SAFE_PATTERN = re.compile(r"[A-Za-z0-9_.\-\\^$|()\[\]*+?]+")
_REPEATED_GROUP = re.compile(r"\)[*+?]|\(\?")
_NESTED_SET = re.compile(r"\[[^\]]*(\[|--|\|\|)")  # `re` warns that it may read these in another way one day
_WILDCARD = re.compile(r"(?<!\\)[*+?]")

# Used here.
_READ = frozenset({
    "peft_type", "task_type", "r", "lora_alpha", "use_rslora", "target_modules", "rank_pattern", "alpha_pattern",
    "bias", "init_lora_weights", "base_model_name_or_path",
})  # fmt: skip
# Say how it was trained; the tensors say the rest.
_INERT = frozenset({
    "auto_mapping", "revision", "inference_mode", "peft_version", "lora_dropout", "exclude_modules",
    "layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size", "eva_config",
    "ensure_weight_tying", "runtime_config",
})  # fmt: skip
# Change what the tensors mean.
UNSUPPORTED = frozenset({
    "use_dora", "lora_bias", "modules_to_save", "layer_replication", "alora_invocation_tokens",
    "trainable_token_indices", "target_parameters", "fan_in_fan_out", "megatron_config", "loftq_config",
    "corda_config", "lora_ga_config", "velora_config", "monteclora_config", "arrow_config", "use_bdlora",
    "use_qalora",
})  # fmt: skip
# These only draw the first values of A and B. PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA alter the base as well.
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True)
class Lora:
    """What the configuration says about the arithmetic. A module is the path in the base, without `.weight`."""

    rank: int
    alpha: float
    rslora: bool
    targets: tuple[str, ...] | str
    rank_patterns: tuple[tuple[re.Pattern[str], int], ...]
    alpha_patterns: tuple[tuple[re.Pattern[str], float], ...]

    def rank_of(self, module: str) -> int:
        """Return the rank that the configuration promises for a module."""
        return next((rank for pattern, rank in self.rank_patterns if pattern.match(module)), self.rank)

    def alpha_of(self, module: str) -> float:
        """Return `lora_alpha` of a module."""
        return next((alpha for pattern, alpha in self.alpha_patterns if pattern.match(module)), self.alpha)

    def scale_of(self, module: str) -> float:
        """Return the factor on B·A: alpha / r, with rsLoRA alpha / √r (arXiv 2312.03732)."""
        rank = self.rank_of(module)
        return self.alpha_of(module) / (math.sqrt(rank) if self.rslora else rank)

    def aims_at(self, module: str) -> bool:
        """Say whether `target_modules` selects a module, as PEFT reads it."""
        if isinstance(self.targets, str):
            return self.targets == ALL_LINEAR or re.fullmatch(self.targets, module) is not None
        return any(f".{module}".endswith(f".{target}") for target in self.targets)


def parse(config: Mapping[str, JSON]) -> tuple[Lora | None, list[Violation]]:
    """Read a configuration; the result is None when a field that the arithmetic needs is malformed."""
    malformed = list(_malformed(config))
    violations = [*malformed, *_refused(config)]
    return (None if malformed else _build(config)), violations


def _malformed(config: Mapping[str, JSON]) -> Iterator[Violation]:
    if not _is_rank(config.get("r")):
        yield _field(config, "r", expected=f"an integer from 1 to {MAX_RANK}")
    if not _is_alpha(config.get("lora_alpha")):
        yield _field(config, "lora_alpha", expected="a number above 0")
    if not isinstance(config.get("use_rslora") or False, bool):
        yield _field(config, "use_rslora", expected="true or false")
    if not _is_targets(config.get("target_modules")):
        yield _field(config, "target_modules", expected="names, a simple pattern, or all-linear")
    for name, check in (("rank_pattern", _is_rank), ("alpha_pattern", _is_alpha)):
        pattern = config.get(name) or {}
        sound = isinstance(pattern, dict) and all(map(check, pattern.values())) and _are_safe(list(pattern))
        if not sound:
            yield _field(config, name, expected="simple patterns of module names, each with a positive number")


def _is_rank(value: JSON) -> bool:
    """Say whether it is a rank; 16.0 is one, as some writers of JSON know only one kind of number."""
    return type(value) in (int, float) and 1 <= float(str(value)) <= MAX_RANK and float(str(value)).is_integer()


def _is_alpha(value: JSON) -> bool:
    return type(value) in (int, float) and 0 < float(str(value)) < math.inf


def _is_targets(value: JSON) -> bool:
    match value:
        case str():
            return value == ALL_LINEAR or _are_safe([value])
        case [*names] if names and len(names) <= MAX_PATTERNS:
            return all(isinstance(name, str) and 0 < len(name) <= MAX_PATTERN_CHARS for name in names)
        case _:
            return False


def _are_safe(patterns: list[str]) -> bool:
    wildcards = [len(_WILDCARD.findall(pattern)) for pattern in patterns]
    few = len(patterns) <= MAX_PATTERNS and sum(wildcards) <= MAX_WILDCARDS
    return few and max(wildcards, default=0) <= MAX_WILDCARDS_PER_PATTERN and all(map(_is_safe, patterns))


def _is_safe(pattern: str) -> bool:
    if len(pattern) > MAX_PATTERN_CHARS or not _SAFE_PATTERN.fullmatch(pattern) or _REPEATED_GROUP.search(pattern):
        return False
    if _NESTED_SET.search(pattern):
        return False
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def _refused(config: Mapping[str, JSON]) -> Iterator[Violation]:
    if config.get("peft_type") != "LORA":
        yield _field(config, "peft_type", expected="LORA", code=Code.PEFT_TYPE)
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        yield _field(config, "task_type", expected="CAUSAL_LM or absent", code=Code.TASK_TYPE)
    if config.get("bias") not in (None, "none"):
        yield _field(config, "bias", expected="none", code=Code.UNSUPPORTED_FIELD)
    if not _is_plain_init(config.get("init_lora_weights")):
        yield _field(
            config, "init_lora_weights", expected="one that leaves the base alone", code=Code.UNSUPPORTED_FIELD
        )
    for name, value in config.items():
        if value and name in UNSUPPORTED:
            yield _field(config, name, expected="absent or false", code=Code.UNSUPPORTED_FIELD)
        elif value and name not in _READ | _INERT:
            yield _field(config, name, expected="a field of PEFT's LoraConfig", code=Code.UNKNOWN_FIELD)


def _is_plain_init(value: JSON) -> bool:
    return value is None or isinstance(value, bool) or (isinstance(value, str) and value in _PLAIN_INITS)


def _field(config: Mapping[str, JSON], name: str, *, expected: str, code: Code = Code.CONFIG_FIELD) -> Violation:
    found = repr(config[name]) if name in config else "absent"
    return violation(code, name, expected=expected, found=found)


def _build(config: Mapping[str, JSON]) -> Lora:
    targets = config["target_modules"]
    return Lora(
        rank=int(_number(config["r"])),
        alpha=_number(config["lora_alpha"]),
        rslora=bool(config.get("use_rslora")),
        targets=tuple(str(name) for name in targets) if isinstance(targets, list) else str(targets),
        rank_patterns=tuple((key, int(value)) for key, value in _patterns(config.get("rank_pattern"))),
        alpha_patterns=tuple(_patterns(config.get("alpha_pattern"))),
    )


def _number(value: JSON) -> float:
    assert isinstance(value, int | float)  # noqa: S101 - `_malformed` said so; this tells the type checker
    return value


def _patterns(pattern: JSON) -> Iterator[tuple[re.Pattern[str], float]]:
    """Compile patterns as PEFT matches them: a whole path, or its end from a dot on; the first match wins."""
    if isinstance(pattern, dict):
        for key, value in pattern.items():
            yield re.compile(rf"(.*\.)?({key})$"), _number(value)
