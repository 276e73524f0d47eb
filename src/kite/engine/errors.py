"""What can go wrong with an engine, and the stable reasons that its texts are mapped to.

vLLM answers nearly every bad adapter with status 500 and a sentence, some with an empty one, and a start that fails
leaves its reason in the log. The sentences change from version to version; the reasons here do not.
"""

import re
from collections.abc import Collection
from enum import StrEnum
from http import HTTPStatus
from typing import ClassVar

from kite.errors import Fault, KiteError

UNAVAILABLE = (HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)


class Refusal(StrEnum):
    """Why an engine refused a request."""

    ALREADY_LOADED = "already_loaded"
    NAME_IS_BASE = "name_is_base"
    ADAPTER_MISSING = "adapter_missing"
    MODEL_UNKNOWN = "model_unknown"
    RANK_TOO_HIGH = "rank_too_high"
    UNSUPPORTED = "unsupported"
    MODULES_UNEXPECTED = "modules_unexpected"
    MALFORMED = "malformed"
    NOT_FINITE = "not_finite"
    NOT_OFFERED = "not_offered"
    BUSY = "busy"
    DEAD = "dead"
    SILENT = "silent"
    OTHER = "other"


class Death(StrEnum):
    """Why a server process ended."""

    BASE_UNREADABLE = "base_unreadable"
    PORT_TAKEN = "port_taken"
    OUT_OF_MEMORY = "out_of_memory"
    NOT_INSTALLED = "not_installed"
    BAD_OPTION = "bad_option"
    SIGNALLED = "signalled"
    KEEPER_LOST = "keeper_lost"
    OTHER = "other"


class EngineError(KiteError):
    """Base of the errors of the engine port."""

    code = "engine"
    fault = Fault.PEER


class EngineUnreachable(EngineError):
    """Nothing answers at the engine's address, or the connection broke."""

    code = "engine_unreachable"
    retryable = True


class EngineLate(EngineError):
    """No answer within the time given (`limit_s` seconds)."""

    code = "engine_late"
    retryable = True

    def __init__(self, what: str, limit_s: float) -> None:
        super().__init__(
            f"no answer to {what} within {limit_s:g} s",
            hint="a paused engine holds its requests: see whether it is paused, then what its log says",
        )
        self.what = what
        self.limit_s = limit_s


class EngineUnplaced(EngineError):
    """The engine cannot be moved to some cores with a niceness, and `why`."""

    code = "engine_unplaced"

    def __init__(self, cores: Collection[int], niceness: int, why: str) -> None:
        where = ",".join(map(str, sorted(cores))) or "any"
        super().__init__(
            f"the engine cannot run on cores {where} with niceness {niceness}: {why}",
            hint="yoco needs the cores that its node registered, and CAP_SYS_NICE once niceness was raised with it",
        )
        self.cores = tuple(cores)
        self.niceness = niceness
        self.why = why


class EngineAnswer(EngineError):
    """An answer came and is no use: not the protocol's form, incomplete, or with numbers that are not finite."""

    code = "engine_answer"


class EngineRefused(EngineError):
    """The engine said no: `reason` is stable, `text` are its own words (may be empty), `status` the HTTP status."""

    code = "engine_refused"

    def __init__(self, what: str, reason: Refusal, text: str, status: int) -> None:
        said = text or "no words with it"
        super().__init__(f"the engine refused {what}: {reason} (status {status}: {said})", hint=HINTS.get(reason, ""))
        self.what = what
        self.reason = reason
        self.text = text
        self.status = status


class EngineDied(EngineError):
    """The server process ended: `exit_code` (negative: signal), `reason`, the sentence that says it, the log's tail."""

    code = "engine_died"

    def __init__(self, exit_code: int, reason: Death, sentence: str, tail: str) -> None:
        said = f": {sentence}" if sentence else ""
        super().__init__(f"the engine ended with code {exit_code} ({reason}){said}", hint=DEATH_HINTS[reason])
        self.exit_code = exit_code
        self.reason = reason
        self.sentence = sentence
        self.tail = tail

    retryable: ClassVar[bool] = False


HINTS = {
    Refusal.ALREADY_LOADED: "a version has its own name: unload that name first, or load under another",
    Refusal.ADAPTER_MISSING: "the folder must exist, with the same path, on the engine's machine",
    Refusal.RANK_TOO_HIGH: "start the engine with a higher max_lora_rank, or recompress the adapter",
    Refusal.NOT_OFFERED: "the engine must run in its development mode for pause, resume and cache reset",
    Refusal.NOT_FINITE: "unload it and reset the prefix cache: NaN stays in reused KV blocks; restart what keeps it",
    Refusal.SILENT: "the engine gave no reason: verify the adapter, and read the engine's log",
}

DEATH_HINTS = {
    Death.BASE_UNREADABLE: "the base must be a folder with config.json, tokenizer and weights",
    Death.PORT_TAKEN: "another program listens on that port: let the engine choose one",
    Death.OUT_OF_MEMORY: "give the KV cache less memory (kv_cache_bytes), or stop another instance",
    Death.NOT_INSTALLED: "install the engine in this environment, or use the fake one",
    Death.BAD_OPTION: "an option of the instance is not accepted by this version of the engine",
    Death.SIGNALLED: "it was stopped from outside; out-of-memory killers do that too",
    Death.KEEPER_LOST: "its keeper was ended from outside, and the kernel ended the engine with it",
    Death.OTHER: "read the end of its log",
}

# First match wins; the texts are those of vLLM 0.32.
REFUSALS: tuple[tuple[str, Refusal], ...] = (
    (r"has already been loaded", Refusal.ALREADY_LOADED),
    (r"conflicts with a served base model", Refusal.NAME_IS_BASE),
    (r"greater than max_lora_rank", Refusal.RANK_TOO_HIGH),
    (r"No adapter found", Refusal.ADAPTER_MISSING),
    (r"cannot be found|The model .* does not exist", Refusal.MODEL_UNKNOWN),
    (r"unsupported|not (yet )?support|only supports", Refusal.UNSUPPORTED),
    (r"expected target modules|unexpected modules|target_modules", Refusal.MODULES_UNEXPECTED),
    (r"not JSON compliant|out of range float|\bnan\b", Refusal.NOT_FINITE),
    (r"EngineCore|engine.*(dead|died)", Refusal.DEAD),
    (r"Missing required|deserializ|safetensor|size of tensor|shape|JSON|must be", Refusal.MALFORMED),
)

BY_STATUS = {
    HTTPStatus.NOT_FOUND: Refusal.NOT_OFFERED,
    HTTPStatus.METHOD_NOT_ALLOWED: Refusal.NOT_OFFERED,
    HTTPStatus.BAD_REQUEST: Refusal.MALFORMED,
    HTTPStatus.UNPROCESSABLE_ENTITY: Refusal.MALFORMED,
    HTTPStatus.TOO_MANY_REQUESTS: Refusal.BUSY,
}

DEATHS: tuple[tuple[str, Death], ...] = (
    (r"No module named '?(vllm|kite|torch)", Death.NOT_INSTALLED),
    (r"address already in use", Death.PORT_TAKEN),
    (r"unrecognized arguments|error: argument|invalid choice|not a valid", Death.BAD_OPTION),
    (r"MemoryError|out of memory|OutOfMemory|less than requested memory|less than desired", Death.OUT_OF_MEMORY),
    (r"Cannot allocate memory|cannot allocate memory|larger than the available KV cache", Death.OUT_OF_MEMORY),
    (r"not a valid (model|local folder)|config\.json|no such base|No such file|safetensors", Death.BASE_UNREADABLE),
    (r"Repo id must|Can't load|is not a local folder|weights? (was|were) not|tokenizer", Death.BASE_UNREADABLE),
)

SENTENCE = re.compile(r"(?:\b[A-Za-z_.]*(?:Error|Exception)\b[^:]*|error):\s*\S.*|\bMemoryError\s*$")


def refusal(status: int, text: str) -> Refusal:
    """Map an answer's status and words to a stable reason."""
    for pattern, reason in REFUSALS:
        if re.search(pattern, text, re.IGNORECASE):
            return reason
    if status in UNAVAILABLE:
        return Refusal.DEAD
    if status in BY_STATUS:
        return BY_STATUS[HTTPStatus(status)]
    return Refusal.OTHER if text else Refusal.SILENT


def sentences(tail: str) -> list[str]:
    """Return the lines of a log that name an error, last first, without their prefixes."""
    found = [match.group(0).strip() for match in map(SENTENCE.search, tail.splitlines()) if match]
    return found[::-1]


def death(exit_code: int, tail: str) -> tuple[Death, str]:
    """Read the reason of an end out of the exit code and the log's tail: (reason, the sentence that says it).

    The cause stands before its consequences in a log ("engine core initialization failed" is the last line of each),
    so the last error sentence that a pattern knows wins, and only then the last one at all.
    """
    said = sentences(tail)
    for sentence in said:
        for pattern, reason in DEATHS:
            if re.search(pattern, sentence, re.IGNORECASE):
                return reason, sentence
    if exit_code < 0:
        return Death.SIGNALLED, said[0] if said else ""
    return Death.OTHER, said[0] if said else ""
