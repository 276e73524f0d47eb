"""Tasks: prompts, each with the one token that is right next, a JSON object a line (examples/adapters/credit.jsonl)."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

from kite.errors import Fault, KiteError, MissingPath

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE_MAX_BYTES = 8 * 1024**2
CASES_MAX = 4_096
PROMPT_MAX_CHARS = 4_000
FORM = '{"prompt": "… Decision:", "answer": " approve"}'
TOKENIZER = "tokenizer.json"


class TaskInvalid(KiteError):
    """A file is no task: `lines` holds every line that is no use, by number, without its prompt."""

    code: ClassVar[str] = "task_invalid"
    fault: ClassVar[Fault] = Fault.USER

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines), hint=f"one object a line: {FORM}; answer_id may be given as well")
        self.lines = tuple(lines)


@dataclass(frozen=True, slots=True)
class Task:
    """Prompts, and the id of the right next token after each."""

    name: str
    prompts: tuple[str, ...]
    answers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """One line: the answer as text, and as a token id where the file gives that too."""

    prompt: str
    answer: str
    answer_id: int | None


def tokenizer(base: Path) -> "Tokenizer":
    """Load the tokenizer of a base. Raises MissingPath."""
    from tokenizers import Tokenizer

    file = base / TOKENIZER
    if not file.is_file():
        raise MissingPath(f"base {base} has no {TOKENIZER}", hint="--task needs it to know the token of each answer")
    return Tokenizer.from_file(str(file))


def read(path: Path, tokens: "Tokenizer") -> Task:
    """Read a task. Raises MissingPath, and TaskInvalid with every line that is no use."""
    found = list(_lines(_text(path)))
    cases = [(number, _case(line)) for number, line in found]
    problems = [f"{path.name}:{number}: {_problem(case, tokens)}" for number, case in cases if _problem(case, tokens)]
    if not problems and not 1 <= len(found) <= CASES_MAX:
        problems = [f"{path.name}: {len(found)} prompts, 1 to {CASES_MAX} are a task"]
    if problems:
        raise TaskInvalid(problems)
    sound = [case for _, case in cases if isinstance(case, Case)]
    return Task(path.stem, tuple(case.prompt for case in sound), tuple(_ids(case, tokens)[0] for case in sound))


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(FILE_MAX_BYTES + 1)
    except OSError as error:
        hint = "give a file of prompts with the right next token"
        raise MissingPath(f"task {path} cannot be read: {error.strerror}", hint=hint) from error
    if len(content) > FILE_MAX_BYTES:
        raise TaskInvalid([f"{path.name} is larger than {FILE_MAX_BYTES} bytes"])
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise TaskInvalid([f"{path.name} is not UTF-8: byte {error.start}"]) from None


def _lines(text: str) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())


def _case(line: str) -> Case | str:
    """Return the case in a line, or what is wrong with the line."""
    try:
        found: object = json.loads(line)
    except (ValueError, RecursionError):
        return "is no JSON"
    fields = cast("dict[str, object]", found) if isinstance(found, dict) else {}
    prompt, answer, answer_id = (fields.get(name) for name in ("prompt", "answer", "answer_id"))
    known = answer_id if isinstance(answer_id, int) and not isinstance(answer_id, bool) else None
    if isinstance(prompt, str) and isinstance(answer, str) and known == answer_id:
        return Case(prompt, answer, known)
    return f"is not of the form {FORM}"


def _problem(case: Case | str, tokens: "Tokenizer") -> str:
    if isinstance(case, str):
        return case
    if not case.prompt.strip() or len(case.prompt) > PROMPT_MAX_CHARS:
        return f"a prompt of {len(case.prompt)} characters: it must say something, in at most {PROMPT_MAX_CHARS}"
    if any("\ud800" <= character <= "\udfff" for character in case.prompt + case.answer):
        return "holds half a character"
    ids = _ids(case, tokens)
    if len(ids) != 1:
        return f"the answer {case.answer!r} is {len(ids)} tokens of this base, not one"
    if case.answer_id not in (None, ids[0]):
        return f"the answer {case.answer!r} is token {ids[0]} of this base, not {case.answer_id}"
    return ""


def _ids(case: Case, tokens: "Tokenizer") -> list[int]:
    return tokens.encode(case.answer, add_special_tokens=False).ids
