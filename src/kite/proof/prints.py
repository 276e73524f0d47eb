"""Effect prints: the recorded distributions that later proofs of a version are held against.

A print is a canonical JSON file `store/prints/<SHA-256 of its bytes>.json` below the adapter root, written once. It
holds integers and token ids: the order of the probes is that of their set, whose digest it names.
"""

import json
from hashlib import sha256
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, ValidationError, model_validator

from kite.engine import Distribution
from kite.errors import Fault, KiteError
from kite.probes import PROMPTS_MAX
from kite.proof.files import write
from kite.proof.micrologs import distribution, micrologs
from kite_schemas.guard import TOKENS_MAX, Micrologs
from kite_schemas.model import Count, Digest, Micronats, Model, Name, Version
from kite_schemas.upcycle import EffectPrint

FOLDER = "store/prints"
PRINT_MAX_BYTES = 1_000_000  # 64 positions of 128 tokens take 250 kB


class PrintMissing(KiteError):
    """A print that an order refers to is not in the store."""

    code: ClassVar[str] = "print_missing"
    fault: ClassVar[Fault] = Fault.OPERATOR

    def __init__(self, path: Path) -> None:
        super().__init__(f"effect print {path} is not there", hint="every node must mount the same adapter root")
        self.path = path


class PrintDamaged(KiteError):
    """A print is not what its name says: nothing is held against it."""

    code: ClassVar[str] = "print_damaged"
    fault: ClassVar[Fault] = Fault.OPERATOR

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"effect print {path} is damaged: {why}", hint="inject the blend again for a new version")
        self.path = path
        self.why = why


class PrintUnwritable(KiteError):
    """A print cannot be written."""

    code: ClassVar[str] = "print_unwritable"
    fault: ClassVar[Fault] = Fault.OPERATOR
    retryable: ClassVar[bool] = True

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"cannot write effect print {path}: {why}", hint="check space and rights of the adapter root")
        self.path = path
        self.why = why


class Position(Model):
    """One position: token ids, and what base and blend give to each."""

    tokens: Annotated[tuple[Count, ...], Field(min_length=1, max_length=TOKENS_MAX)]
    base: Micrologs
    blend: Micrologs

    @model_validator(mode="after")
    def _same_length(self) -> Self:
        if not len(set(self.tokens)) == len(self.tokens) == len(self.base) == len(self.blend):
            msg = "tokens and log-probabilities are not one to one"
            raise ValueError(msg)
        return self


class Print(Model):
    """What was measured when the version was first loaded."""

    format: Literal[1] = 1
    base: Name
    version: Version
    probes: Digest
    positions: Annotated[tuple[Position, ...], Field(min_length=1, max_length=PROMPTS_MAX)]
    distance_micronats: Micronats = Field(description="mean KL(base ‖ blend)")


def position(base: Distribution, blend: Distribution) -> Position:
    """Record one position of two distributions over the same tokens."""
    tokens = sorted(base.logprobs)
    return Position(tokens=tuple(tokens), base=micrologs(base, tokens), blend=micrologs(blend, tokens))


def sides(recorded: Position) -> tuple[Distribution, Distribution]:
    """Return what was recorded of base and blend, exact to half a millionth of a nat."""
    return distribution(recorded.tokens, recorded.base), distribution(recorded.tokens, recorded.blend)


def place(digest: str) -> str:
    """Return where the print of a digest lies, below the adapter root."""
    return f"{FOLDER}/{digest}.json"


def record(root: Path, made: Print) -> EffectPrint:
    """Write a print below the adapter root, complete or not at all, and return the reference. Raises PrintUnwritable.

    Equal prints are one file.
    """
    content = canonical(made)
    digest = sha256(content).hexdigest()
    reference = EffectPrint(path=place(digest), digest=digest, distance_micronats=made.distance_micronats)
    path = root / reference.path
    try:
        write(path, content)
    except OSError as error:
        raise PrintUnwritable(path, error.strerror or str(error)) from error
    return reference


def canonical(made: Print) -> bytes:
    """Return the one way to write a print: sorted keys, no spaces, ASCII, a line end."""
    text = json.dumps(made.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return f"{text}\n".encode()


def recall(root: Path, reference: EffectPrint) -> Print:
    """Read the print that a reference names. Raises PrintMissing, or PrintDamaged when it is not what it says."""
    path = root / reference.path
    content = _read(path)
    found = sha256(content).hexdigest()
    if found != reference.digest:
        raise PrintDamaged(path, f"its digest is {found}, not {reference.digest}")
    try:
        made = Print.model_validate_json(content)
    except ValidationError as error:
        raise PrintDamaged(path, str(error.errors(include_input=False)[0]["msg"])) from error
    if made.distance_micronats != reference.distance_micronats:
        raise PrintDamaged(path, f"it records {made.distance_micronats}, not {reference.distance_micronats} micronats")
    return made


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise PrintMissing(path)
    try:
        with path.open("rb") as file:
            return file.read(PRINT_MAX_BYTES + 1)
    except OSError as error:
        raise PrintDamaged(path, error.strerror or str(error)) from error
