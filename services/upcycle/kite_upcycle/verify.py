"""The compatibility contract: does this adapter fit this base and these servers? Every violation at once.

Decided here, where PEFT and vLLM are silent:
- a target that the base has but the adapter has no tensors for is a violation (half an adapter would be served);
  a target that the base does not have is PEFT's normal behaviour and is let through;
- a tensor outside `target_modules` is a violation: PEFT would drop it and vLLM would serve it;
- a module whose A or B is all zero has no effect and is a violation; when all are, there is one for the whole adapter;
- tensors for embeddings or the output head change the vocabulary and are refused;
- the recorded name of the base is no evidence, so a difference is a note, not a violation.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kite_upcycle import lora, stamp
from kite_upcycle.base import VOCABULARY_LEAVES, Base
from kite_upcycle.header import Entry
from kite_upcycle.lora import Lora
from kite_upcycle.reader import SUPPORTED_DTYPES, TENSORS_NAME, Findings, Tensors, examine, one_thread
from kite_upcycle.stamp import Demand, Stamp, Verdict
from kite_upcycle.violations import Code, Violation, bounded, clip, layer_number, violation

PPM = 1_000_000
KEY = re.compile(r"base_model\.model\.(?P<module>[A-Za-z0-9_\-]+(?:\.[A-Za-z0-9_\-]+)*)\.lora_(?P<side>[AB])\.weight")
_HEADS_BY_ROWS = {"q_proj": "heads", "k_proj": "key/value heads", "v_proj": "key/value heads"}
_HEADS_BY_COLUMNS = {"o_proj": "heads"}


@dataclass(frozen=True)
class Limits:
    """What the servers and the policy allow: rank, and parameters as a share of the base in parts per million."""

    max_lora_rank: int
    params_share_max_ppm: int


@dataclass(frozen=True)
class Report:
    """The outcome. `digest` is None when the files could not be hashed; `rank` is the highest of any module.

    `stamp` is None when there is none, none that can be read, or none that was asked for.
    """

    violations: tuple[Violation, ...]
    notes: tuple[str, ...]
    digest: str | None
    parameters: int
    share_ppm: int
    rank: int
    modules: int
    stamp: Stamp | None = None

    @property
    def accepted(self) -> bool:
        """Whether the adapter keeps the whole contract."""
        return not self.violations


@dataclass(frozen=True)
class Pair:
    """The two tensors of one module; each is None when the file has only the other."""

    module: str
    a: Entry | None
    b: Entry | None

    @property
    def sides(self) -> tuple[Entry, ...]:
        """The tensors that are there."""
        return tuple(entry for entry in (self.a, self.b) if entry is not None)


def verify(
    adapter_path: Path,
    base: Base | Path,
    limits: Limits,
    *,
    root: Path | None = None,
    demand: Demand | None = Demand(),  # noqa: B008 - immutable
) -> Report:
    """Check an adapter folder against a base and limits; `root` as in `reader.read`.

    `demand` says what is asked of its stamp; None leaves the stamp aside. Bad adapters never raise. Raises MissingPath
    or UnreadableBase when `base` is a path and not a base.
    """
    known = base if isinstance(base, Base) else Base.load(base)
    with one_thread(), examine(adapter_path, root=root) as findings:
        return _report(findings, known, limits, demand)


def share_ppm(parameters: int, base: Base) -> int:
    """Return parameters as a share of the base's in ppm, rounded up: above an integer limit exactly when it is."""
    return -(-parameters * PPM // base.parameters)


def _report(findings: Findings, base: Base, limits: Limits, demand: Demand | None) -> Report:
    settings, violations = (None, []) if findings.config is None else lora.parse(findings.config)
    tensors = findings.tensors
    entries: Mapping[str, Entry] = {} if tensors is None else tensors.entries
    pairs, named = resolve(entries, base)
    violations = [*findings.violations, *violations, *named]
    violations += [found for pair in pairs for found in _check_pair(pair, base, settings)]
    if settings is not None and entries:
        violations += _check_targets(settings, entries, pairs, base)
    if tensors is not None and tensors.sound:
        violations += [*_check_contents(tensors, pairs), *tensors.changed()]
    stamped = _check_stamp(tensors, base, demand)
    violations += stamped.violations
    rank = _highest_rank(settings, pairs)
    parameters = sum(entry.elements for entry in entries.values())
    violations += _check_limits(rank, parameters, base, limits)
    return Report(
        violations=bounded(violations),
        notes=(*_notes(findings, base), *stamped.notes),
        digest=findings.digest,
        parameters=parameters,
        share_ppm=share_ppm(parameters, base),
        rank=rank,
        modules=len(pairs),
        stamp=stamped.stamp,
    )


def _check_stamp(tensors: Tensors | None, base: Base, demand: Demand | None) -> Verdict:
    if tensors is None or demand is None:
        return Verdict(None, (), ())
    return stamp.check(tensors.metadata, base, demand)


def resolve(entries: Mapping[str, Entry], base: Base) -> tuple[list[Pair], list[Violation]]:
    """Pair the tensors by module, layer by layer; what resolves to no linear layer of the base is a violation."""
    sides: dict[str, dict[str, Entry]] = {}
    violations: list[Violation] = []
    for key, entry in entries.items():
        found = _name_violation(key, base)
        if found is not None:
            violations.append(found)
        elif match := KEY.fullmatch(key):
            sides.setdefault(match["module"], {})[match["side"]] = entry
    pairs = [Pair(module, both.get("A"), both.get("B")) for module, both in sorted(sides.items(), key=_in_order)]
    return pairs, violations


def _in_order(item: tuple[str, object]) -> list[tuple[int, str]]:
    """Sort numbers in a module's path as numbers: layer 2 comes before layer 10."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in item[0].split(".")]


def _name_violation(key: str, base: Base) -> Violation | None:
    if any(part in VOCABULARY_LEAVES for part in key.split(".")):
        return violation(Code.VOCABULARY, key, expected="the vocabulary of the base", found="tensors for it")
    match = KEY.fullmatch(key)
    if match is None:
        expected = "base_model.model.<module>.lora_A.weight or lora_B.weight"
        return violation(Code.KEY_PATTERN, key, expected=expected, found=key)
    module = match["module"]
    if module in base.modules:
        return None
    number = layer_number(module)
    if number is not None and number >= base.layers:
        return violation(Code.LAYER_RANGE, key, expected=f"layers 0 to {base.layers - 1}", found=f"layer {number}")
    return violation(Code.UNKNOWN_MODULE, key, expected="a linear layer of the base", found=module)


def _check_pair(pair: Pair, base: Base, settings: Lora | None) -> Iterator[Violation]:
    if pair.a is None or pair.b is None:
        missing, present = ("lora_A", "lora_B") if pair.a is None else ("lora_B", "lora_A")
        yield violation(Code.MISSING_PAIR, pair.module, expected="lora_A and lora_B", found=f"{present}, no {missing}")
    out_features, in_features = base.modules[pair.module]
    if pair.a is not None:
        yield from _check_side(pair.a, pair.module, axes=(0, 1), features=in_features, base=base, settings=settings)
    if pair.b is not None:
        yield from _check_side(pair.b, pair.module, axes=(1, 0), features=out_features, base=base, settings=settings)


def _check_side(
    entry: Entry, module: str, *, axes: tuple[int, int], features: int, base: Base, settings: Lora | None
) -> Iterator[Violation]:
    """Check one tensor whose rank and feature axes are `axes`: A is (rank, in), B is (out, rank)."""
    if entry.dtype not in SUPPORTED_DTYPES:
        yield violation(Code.DTYPE, entry.name, expected=" or ".join(SUPPORTED_DTYPES), found=entry.dtype)
    if len(entry.shape) != len(axes):
        yield violation(Code.SHAPE, entry.name, expected="two dimensions", found=str(list(entry.shape)))
        return
    rank, found = entry.shape[axes[0]], entry.shape[axes[1]]
    if settings is not None and rank != settings.rank_of(module):
        expected = f"rank {settings.rank_of(module)} as configured"
        yield violation(Code.RANK, entry.name, expected=expected, found=f"rank {rank}")
    if found != features:
        table = _HEADS_BY_COLUMNS if axes == (0, 1) else _HEADS_BY_ROWS
        noun = table.get(module.rsplit(".", 1)[-1])
        yield _heads_violation(module, noun, features, found, base.head_dim) or _shape_violation(entry, axes, features)


def _heads_violation(module: str, noun: str | None, features: int, found: int, head_dim: int) -> Violation | None:
    """Say it in heads when both widths are whole numbers of heads: then the KV cache is what does not line up."""
    if noun is None or head_dim == 0 or features % head_dim or found % head_dim:
        return None
    ours, theirs = features // head_dim, found // head_dim
    return violation(Code.ATTENTION_HEADS, module, expected=f"{ours} {noun}", found=f"{theirs} {noun}")


def _shape_violation(entry: Entry, axes: tuple[int, int], features: int) -> Violation:
    rank = entry.shape[axes[0]]
    expected = [rank, features] if axes == (0, 1) else [features, rank]
    return violation(Code.SHAPE, entry.name, expected=str(expected), found=str(list(entry.shape)))


def _check_targets(settings: Lora, entries: Mapping[str, Entry], pairs: list[Pair], base: Base) -> Iterator[Violation]:
    for pair in pairs:
        if not settings.aims_at(pair.module):
            found = pair.module
            yield violation(
                Code.OUTSIDE_TARGETS, pair.sides[0].name, expected="a module of target_modules", found=found
            )
    if isinstance(settings.targets, str):
        return
    carried = _endings(key.split(".lora_", 1)[0] for key in entries)
    offered = _endings(base.modules)
    for target in settings.targets:
        if target in offered and target not in carried:
            expected = "tensors for each target that the base has"
            yield violation(
                Code.TARGET_WITHOUT_TENSORS, "target_modules", expected=expected, found=f"none for {target}"
            )


def _endings(paths: Iterable[str]) -> set[str]:
    """Return every ending of each path that starts at a dot: what an entry of `target_modules` can select."""
    split = [path.split(".") for path in paths]
    return {".".join(parts[start:]) for parts in split for start in range(len(parts))}


def _check_contents(tensors: Tensors, pairs: list[Pair]) -> Iterator[Violation]:
    zero: list[Pair] = []
    for pair in pairs:
        extremes = {entry.name: _extremes(tensors, entry) for entry in pair.sides if entry.dtype in SUPPORTED_DTYPES}
        for name, (lowest, highest) in extremes.items():
            if not (math.isfinite(lowest) and math.isfinite(highest)):
                found = "nan" if math.isnan(lowest) else f"{lowest} to {highest}"
                yield violation(Code.NOT_FINITE, name, expected="finite numbers", found=found)
        if (0.0, 0.0) in extremes.values():
            zero.append(pair)
    if len(zero) == len(pairs) and (pairs or not tensors.entries):
        found = "all A·B are zero, as before training" if pairs else "no tensors"
        yield violation(Code.NO_EFFECT, TENSORS_NAME, expected="an effect", found=found)
        return
    for pair in zero:
        yield violation(Code.ZERO_MODULE, pair.module, expected="an effect", found="A or B is all zero")


def _extremes(tensors: Tensors, entry: Entry) -> tuple[float, float]:
    """Return the lowest and highest element; both are NaN if any is. One pass over the bytes."""
    if entry.elements == 0:
        return 1.0, 1.0  # its shape is a violation already
    try:
        lowest, highest = tensors.load(entry.name).aminmax()
    except EOFError:
        return 1.0, 1.0  # so is this: the file has changed
    return float(lowest), float(highest)


def _highest_rank(settings: Lora | None, pairs: list[Pair]) -> int:
    configured = [settings.rank_of(pair.module) for pair in pairs] or [settings.rank] if settings is not None else []
    carried = [pair.a.shape[0] for pair in pairs if pair.a is not None and pair.a.shape]
    return max([*configured, *carried], default=0)


def _check_limits(rank: int, parameters: int, base: Base, limits: Limits) -> Iterator[Violation]:
    if rank > limits.max_lora_rank:
        expected = f"at most {limits.max_lora_rank}, the servers' max_lora_rank"
        yield violation(Code.RANK_LIMIT, "r", expected=expected, found=str(rank))
    share = share_ppm(parameters, base)
    if share > limits.params_share_max_ppm:
        found = f"{share} ppm ({parameters} of {base.parameters})"
        expected = f"at most {limits.params_share_max_ppm} ppm of the base's parameters"
        yield violation(Code.PARAMS_SHARE, TENSORS_NAME, expected=expected, found=found)


def _notes(findings: Findings, base: Base) -> Iterator[str]:
    recorded = (findings.config or {}).get("base_model_name_or_path")
    if isinstance(recorded, str) and recorded and recorded.rstrip("/").rsplit("/", 1)[-1] not in base.names:
        yield clip(f"trained on {recorded}, verified against {min(base.names)}: names prove nothing, shapes fit or not")
