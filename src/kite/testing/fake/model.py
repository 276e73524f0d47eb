"""What the fake serves: a base, and adapters merged into it, with vLLM's conditions for loading them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kite.errors import MissingPath
from kite.testing.fake.slots import Slots
from kite.testing.llama import PEFT_PREFIX, Llama, tensors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"


class Refused(Exception):
    """The request is answered with this status and these words."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


@dataclass(slots=True)
class Served:
    """A base under its name and the adapters loaded beside it."""

    name: str
    base: Llama
    tokenizer: "Tokenizer"
    max_model_len: int
    max_lora_rank: int
    adapters: dict[str, Llama | None] = field(default_factory=dict[str, Llama | None])  # None: lost in a deep sleep
    paths: dict[str, str] = field(default_factory=dict[str, str])
    slots: Slots = field(default_factory=Slots)

    @classmethod
    def open(cls, name: str, base: Path, *, max_model_len: int, max_loras: int, max_lora_rank: int) -> "Served":
        """Read the folder of a base. Raises MissingPath, or OSError for one without a tokenizer."""
        from tokenizers import Tokenizer

        tokenizer = base / "tokenizer.json"
        model = Llama.load(base)
        text = tokenizer.read_text()
        return cls(name, model, Tokenizer.from_str(text), max_model_len, max_lora_rank, slots=Slots(max_loras))

    def load(self, name: str, path: str) -> None:
        """Merge an adapter under a new name. Raises Refused with what vLLM answers."""
        self._check_name(name)
        folder = Path(path)
        try:
            config = cast("Mapping[str, object]", json.loads((folder / CONFIG).read_text()))
        except OSError as error:
            text = f"Loading lora {name} failed: No adapter found for {path}"
            raise Refused(HTTPStatus.NOT_FOUND, text) from error
        except ValueError as error:
            raise Refused(HTTPStatus.INTERNAL_SERVER_ERROR, str(error)) from error
        if problems := " ".join(self._problems(config)):
            raise Refused(HTTPStatus.INTERNAL_SERVER_ERROR, problems)
        self.adapters[name] = self._merged(folder)
        self.paths[name] = path
        self.slots.take(name, path)

    def unload(self, name: str) -> None:
        """Take a name away. Raises Refused."""
        if name not in self.adapters:
            raise Refused(HTTPStatus.NOT_FOUND, f"The lora adapter '{name}' cannot be found.")
        del self.adapters[name], self.paths[name]
        self.slots.forget(name)

    def model(self, name: str) -> Llama:
        """Return what is served under a name. Raises Refused."""
        if name == self.name:
            return self.base
        if name not in self.adapters:
            raise Refused(HTTPStatus.NOT_FOUND, f"The model `{name}` does not exist.")
        found = self.adapters[name]
        if found is None:
            raise Refused(HTTPStatus.INTERNAL_SERVER_ERROR, f"KeyError: {name!r}")
        return found

    def ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the tokens of a prompt. Raises Refused when they are none or too many."""
        found = self.tokenizer.encode(prompt).ids if isinstance(prompt, str) else list(prompt)
        if not 0 < len(found) < self.max_model_len:
            text = f"This model's maximum context length is {self.max_model_len} tokens, the prompt has {len(found)}."
            raise Refused(HTTPStatus.BAD_REQUEST, text)
        if any(not 0 <= token < self.base.vocab for token in found):
            raise Refused(HTTPStatus.BAD_REQUEST, "The prompt has a token that is out of vocabulary.")
        return found

    def _check_name(self, name: str) -> None:
        if name == self.name:
            text = f"The lora adapter '{name}' conflicts with a served base model."
            raise Refused(HTTPStatus.BAD_REQUEST, text)
        if name in self.adapters:
            raise Refused(HTTPStatus.BAD_REQUEST, f"The lora adapter '{name}' has already been loaded.")

    def _problems(self, config: Mapping[str, object]) -> list[str]:
        rank = config.get("r")
        if not isinstance(rank, int) or rank <= 0:
            return [f"LoRA rank `r` must be a positive integer, got {rank}."]
        found: list[str] = []
        if config.get("modules_to_save"):
            found.append("vLLM only supports modules_to_save being either None or a classification head.")
        if config.get("use_dora"):
            found.append("vLLM does not yet support DoRA.")
        if rank > self.max_lora_rank:
            found.append(f"LoRA rank {rank} is greater than max_lora_rank {self.max_lora_rank}.")
        return found

    def _merged(self, folder: Path) -> Llama:
        from safetensors import SafetensorError

        try:
            modules = {module_of(key) for key in tensors(folder / TENSORS)}
            self._check_modules(folder, modules)
            return self.base.merged([(folder, 1.0)])
        except MissingPath as error:
            raise Refused(HTTPStatus.INTERNAL_SERVER_ERROR, f"{folder} doesn't contain tensors") from error
        except SafetensorError as error:
            raise Refused(HTTPStatus.INTERNAL_SERVER_ERROR, str(error)) from error
        except (RuntimeError, KeyError) as error:  # torch: shapes that do not fit; vLLM's assertion has no words
            raise Refused(HTTPStatus.INTERNAL_SERVER_ERROR, "") from error

    def _check_modules(self, folder: Path, modules: set[str]) -> None:
        known = {name.removesuffix(".weight").rpartition(".")[2] for name in self.base.weights}
        strange = sorted(module for module in modules if module.rpartition(".")[2] not in known)
        if strange:
            text = f"While loading {folder}, expected target modules in {sorted(known)} but received {strange}."
            raise Refused(HTTPStatus.INTERNAL_SERVER_ERROR, text)


def module_of(key: str) -> str:
    """Return the module that a tensor of an adapter belongs to."""
    return key.removeprefix(PEFT_PREFIX).partition(".lora_")[0]
