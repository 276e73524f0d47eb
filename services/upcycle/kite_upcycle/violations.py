"""What can be wrong with an adapter: one stable code per kind, and the record that names it."""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from kite.errors import Fault, KiteError

MAX_TEXT_CHARS = 160
MAX_VIOLATIONS = 1_000


class Code(StrEnum):
    """Stable codes: a released one is never renamed, because alerts and runbooks quote it."""

    # Files
    OUTSIDE_ROOT = "outside_root"
    PATH_NAME = "path_name"
    SYMLINK = "symlink"
    MISSING_FILE = "missing_file"
    NOT_A_FILE = "not_a_file"
    FILE_SIZE = "file_size"
    FILE_CHANGED = "file_changed"
    PICKLE_FILE = "pickle_file"
    # Safetensors header against file
    HEADER_SIZE = "header_size"
    HEADER_JSON = "header_json"
    TENSOR_COUNT = "tensor_count"
    TENSOR_ENTRY = "tensor_entry"
    TENSOR_OVERLAP = "tensor_overlap"
    TENSOR_GAP = "tensor_gap"
    DATA_SIZE = "data_size"
    # The stamp in the header's metadata, against the base and how it is served
    STAMP_MISSING = "stamp_missing"
    STAMP_VERSION = "stamp_version"
    STAMP_FIELD = "stamp_field"
    KV_CACHE_LAYOUT_HASH = "kv_cache_layout_hash"
    NORM_EPS = "norm_eps"
    ROPE_THETA = "rope_theta"
    BASE_IDENTITY = "base_identity"
    # Configuration
    CONFIG_JSON = "config_json"
    CONFIG_FIELD = "config_field"
    PEFT_TYPE = "peft_type"
    TASK_TYPE = "task_type"
    UNSUPPORTED_FIELD = "unsupported_field"
    UNKNOWN_FIELD = "unknown_field"
    # Names against the base
    KEY_PATTERN = "key_pattern"
    UNKNOWN_MODULE = "unknown_module"
    LAYER_RANGE = "layer_range"
    VOCABULARY = "vocabulary"
    MISSING_PAIR = "missing_pair"
    TARGET_WITHOUT_TENSORS = "target_without_tensors"
    OUTSIDE_TARGETS = "outside_targets"
    # Shapes and contents
    SHAPE = "shape"
    ATTENTION_HEADS = "attention_heads"
    RANK = "rank"
    RANK_LIMIT = "rank_limit"
    DTYPE = "dtype"
    NOT_FINITE = "not_finite"
    ZERO_MODULE = "zero_module"
    NO_EFFECT = "no_effect"
    PARAMS_SHARE = "params_share"
    # The report's own bound
    MORE = "more"


@dataclass(frozen=True)
class Violation:
    """One broken clause of the contract: `where` is a tensor, a field or a file; the rest is text for people."""

    code: str
    where: str
    expected: str
    found: str

    def __str__(self) -> str:
        """Return one line; an attention mismatch names its layer, as operators search for that sentence."""
        if self.code == Code.ATTENTION_HEADS:
            bare = self.expected.split(" ", 1)[0]
            return f"KV cache alignment mismatch at {layer_of(self.where)}: adapter {self.found}, base {bare}"
        return f"{self.code} at {self.where}: expected {self.expected}, found {self.found}"


class UnreadableAdapter(KiteError):
    """The adapter's files cannot be read safely; `violations` holds every reason."""

    code: ClassVar[str] = "unreadable_adapter"
    fault: ClassVar[Fault] = Fault.USER

    def __init__(self, path: str, violations: tuple[Violation, ...]) -> None:
        listed = "; ".join(str(violation) for violation in violations[:5])
        super().__init__(
            f"adapter {clip(path)} cannot be read: {listed}",
            hint="save it again with PEFT's save_pretrained (safetensors), below the adapter root, without symlinks",
        )
        self.path = path
        self.violations = violations


def violation(code: Code, where: str, *, expected: str, found: str) -> Violation:
    """Make a violation whose texts are bounded and printable: names come from files of strangers."""
    return Violation(code.value, clip(where), clip(expected), clip(found))


def clip(text: str) -> str:
    """Escape what is not printable ASCII and cut to `MAX_TEXT_CHARS`.

    >>> clip("q_proj" + chr(27))
    'q_proj\\\\x1b'
    """
    cut = text if len(text) <= MAX_TEXT_CHARS else text[: MAX_TEXT_CHARS - 1] + "…"
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in cut)


def layer_of(module: str) -> str:
    """Name the layer of a module path, or the path itself.

    >>> layer_of("model.layers.12.self_attn.q_proj")
    'layer 12'
    """
    number = layer_number(module)
    return module if number is None else f"layer {number}"


def layer_number(module: str) -> int | None:
    """Return the first all-digit component of a module path: the layer's number in every decoder layout.

    >>> layer_number("model.layers.12.mlp.experts.3.w1"), layer_number("lm_head")
    (12, None)
    """
    digits = (part for part in module.split(".") if part.isdecimal() and part.isascii())
    return next((int(part) for part in digits), None)


def bounded(found: list[Violation]) -> tuple[Violation, ...]:
    """Keep the first `MAX_VIOLATIONS` and say how many more there are, so that a report fits into one event."""
    if len(found) <= MAX_VIOLATIONS:
        return tuple(found)
    rest = len(found) - MAX_VIOLATIONS
    more = violation(Code.MORE, "report", expected=f"at most {MAX_VIOLATIONS} violations", found=f"{rest} more")
    return (*found[:MAX_VIOLATIONS], more)
