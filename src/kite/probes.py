"""Probe sets: the fixed prompts after which next-token distributions are measured.

A set is named by the digest of its file. Only the digest travels in events; the texts appear in no event, span or log.
People write a set as text, one probe a line: a blank line is passed over, spaces around a probe are not part of it, and
a line that begins with a quotation mark is a JSON string, which can hold anything.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from importlib.resources import files
from typing import Annotated, ClassVar, Literal, cast

from pydantic import Field, StringConstraints, ValidationError

from kite.errors import Fault, KiteError
from kite_schemas.model import Model
from kite_schemas.probes import PROBES_MAX

PROMPTS_MAX = PROBES_MAX
PROMPTS_MIN = 8  # of a set that people write: a mean over fewer positions depends on the choice of probes
PROMPT_MAX_CHARS = 400
FILE_MAX_BYTES = 64 * 1024
SHORT_MAX_BYTES = 7  # at most 8 tokens: a token stands for a byte at least, and one more may mark the beginning
LONG_MIN_WORDS = 33  # more than 32 tokens, a KV block of a CPU engine: a word is a token at least

Prompt = Annotated[str, StringConstraints(min_length=1, max_length=PROMPT_MAX_CHARS, pattern=r"\S")]


class ProbesInvalid(KiteError):
    """A file is no probe set, or one that proofs cannot work with."""

    code: ClassVar[str] = "probes_invalid"
    fault: ClassVar[Fault] = Fault.USER


class ProbeFile(Model):
    """What a file of probes holds."""

    version: Literal[1]
    prompts: tuple[Prompt, ...] = Field(max_length=PROMPTS_MAX)


@dataclass(frozen=True)
class Probes:
    """A probe set: the SHA-256 of its file (hex), and the prompts in their order."""

    digest: str
    prompts: tuple[str, ...]

    @cached_property
    def short(self) -> tuple[int, ...]:
        """The indices of the prompts of at most 8 tokens, whatever the tokenizer: those a wake is proven with."""
        return tuple(i for i, prompt in enumerate(self.prompts) if len(prompt.encode()) <= SHORT_MAX_BYTES)

    @cached_property
    def long(self) -> int:
        """The index of the prompt with most words: it fills a KV block."""
        return max(range(len(self.prompts)), key=lambda i: len(self.prompts[i].split()))


def default() -> Probes:
    """Return the neutral set that KITE ships: 16 short prompts with likely continuations, and a long one."""
    return parse(_shipped(), "the shipped probe set")


def _shipped() -> bytes:
    return files("kite").joinpath("probes.json").read_bytes()


def parse(content: bytes, name: str) -> Probes:
    """Return the probe set in the bytes of a file called `name`. Raises ProbesInvalid without quoting a prompt."""
    if len(content) > FILE_MAX_BYTES:
        raise ProbesInvalid(f"{name} is larger than {FILE_MAX_BYTES} bytes", hint="use fewer or shorter prompts")
    try:
        prompts = ProbeFile.model_validate_json(content).prompts
    except ValidationError as error:
        where = ".".join(map(str, error.errors(include_input=False)[0]["loc"]))
        why = error.errors(include_input=False)[0]["msg"]
        raise ProbesInvalid(f"{name} is no probe set: {where}: {why}", hint=f"at most {PROMPTS_MAX} prompts") from None
    probes = Probes(sha256(content).hexdigest(), prompts)
    if problem := _problem(probes):
        raise ProbesInvalid(f"{name}: {problem}", hint="a wake needs a short prompt, a first proof a long one")
    return probes


def _problem(probes: Probes) -> str:
    if len(set(probes.prompts)) < len(probes.prompts):
        return "a prompt occurs twice"
    if not probes.short:
        return f"no prompt has at most {SHORT_MAX_BYTES} bytes"
    if len(probes.prompts[probes.long].split()) < LONG_MIN_WORDS:
        return f"no prompt has at least {LONG_MIN_WORDS} words"
    return ""


def content(prompts: Sequence[str]) -> bytes:
    """Return the one way to write a set to a file of the store; the shipped prompts are the shipped file."""
    if tuple(prompts) == default().prompts:
        return _shipped()
    record = {"prompts": list(prompts), "version": 1}
    return f"{json.dumps(record, sort_keys=True, separators=(',', ':'), ensure_ascii=True)}\n".encode()


def read(text: bytes, name: str) -> Probes:
    """Return the set that somebody wrote as text, one probe a line, in a file called `name`.

    Raises ProbesInvalid with every line that cannot be a probe, by its number, without quoting any.
    """
    if len(text) > FILE_MAX_BYTES:
        raise ProbesInvalid(f"{name} is larger than {FILE_MAX_BYTES} bytes", hint="use fewer or shorter probes")
    try:
        found = list(lines(text.decode()))
    except UnicodeDecodeError as error:
        raise ProbesInvalid(f"{name} is not UTF-8: byte {error.start}", hint="write it as UTF-8 text") from None
    refuse([f"{name}:{line}: {_fault(prompt)}" for line, prompt in found if _fault(prompt)])
    prompts = [cast("str", prompt) for _, prompt in found]
    if not PROMPTS_MIN <= len(prompts) <= PROMPTS_MAX:
        hint = "one probe a line; blank lines do not count"
        raise ProbesInvalid(f"{name}: {len(prompts)} probes, {PROMPTS_MIN} to {PROMPTS_MAX} are a set", hint=hint)
    return parse(content(prompts), name)


def refuse(problems: Sequence[str]) -> None:
    """Raise ProbesInvalid when there are problems, each on a line of its own."""
    if problems:
        raise ProbesInvalid("\n".join(problems), hint='one probe a line; one that begins with " is a JSON string')


def lines(text: str) -> Iterator[tuple[int, str | None]]:
    """Yield the number and the probe of every line that is not blank; None for JSON that is no string."""
    for number, line in enumerate(text.split("\n"), 1):
        stripped = line.strip()
        if stripped:
            yield number, _from_json(stripped) if stripped.startswith('"') else stripped


def line(prompt: str) -> str:
    """Return the line that `lines` reads as this probe."""
    plain = prompt == prompt.strip() and "\n" not in prompt and not prompt.startswith('"')
    return prompt if plain else json.dumps(prompt, ensure_ascii=False)


def _from_json(text: str) -> str | None:
    try:
        value: object = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _fault(prompt: str | None) -> str:
    if prompt is None:
        return "begins with a quotation mark and is no JSON string"
    if not prompt.strip():
        return "is blank"
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        return "holds half a character"
    return f"{len(prompt)} characters, at most {PROMPT_MAX_CHARS}" if len(prompt) > PROMPT_MAX_CHARS else ""
