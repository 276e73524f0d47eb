"""Probe sets: the fixed prompts after which next-token distributions are measured.

A set is named by the digest of its file. Only the digest travels in events; the texts appear in no event, span or log.
"""

from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from importlib.resources import files
from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints, ValidationError

from kite.errors import Fault, KiteError
from kite_schemas.model import Model

PROMPTS_MAX = 64
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
    return parse(files("kite").joinpath("probes.json").read_bytes(), "the shipped probe set")


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
