"""vLLM's model loader of KITE, which waits at the gate before it reads the weights; only vLLM imports this module.

A loader has to be registered in the process of vLLM's worker, before its model is loaded. Just then the worker asks the
module that `--worker-extension-cls` names for a class: `HeldExtension` is that class, and the loader is registered with
it.
"""

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from kite.held import gate
from kite.telemetry.extension import Extension

LOAD_FORMAT = "kite_held"
EXTENSION = "kite.held.loader.HeldExtension"
WIDTH = 512  # of the rehearsal: a square of it is 1 MB in float32
TOKENS = 32
HEADS = 8


class LoadConfig(Protocol):
    """The part of vLLM's configuration of loading that is used here."""

    load_format: str


class ModelConfig(Protocol):
    """The part of vLLM's configuration of a model that is used here."""

    @property
    def model(self) -> str: ...
    @property
    def dtype(self) -> object: ...


class Loader:
    """The part of vLLM's own loader that is used here."""

    def __init__(self, load_config: LoadConfig) -> None: ...
    def load_model(self, vllm_config: object, model_config: ModelConfig, prefix: str = "") -> object: ...


class Loaders(Protocol):
    """The part of vLLM's module of loaders that is used here."""

    DefaultModelLoader: type[Loader]

    def register_model_loader(self, load_format: str) -> Callable[[type[Loader]], type[Loader]]: ...


def register() -> None:
    """Make `--load-format kite_held` known in this process."""
    loaders = cast("Loaders", import_module("vllm.model_executor.model_loader"))

    class HeldLoader(loaders.DefaultModelLoader):
        """Rehearses, waits, and then loads as vLLM does."""

        def __init__(self, load_config: LoadConfig) -> None:
            load_config.load_format = "auto"  # what is read at last is the usual thing
            super().__init__(load_config)

        def load_model(self, vllm_config: object, model_config: ModelConfig, prefix: str = "") -> object:
            rehearse(model_config.dtype)
            fetch(Path(model_config.model))
            gate.wait()
            return super().load_model(vllm_config, model_config, prefix)

    loaders.register_model_loader(LOAD_FORMAT)(HeldLoader)


def rehearse(dtype: object) -> None:
    """Run one layer of at most 1 MB, so that the hardware's libraries have been loaded and set up."""
    import torch

    number = cast("torch.dtype", dtype)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    weight = torch.zeros(WIDTH, WIDTH, dtype=number, device=device)
    hidden = torch.zeros(1, TOKENS, WIDTH, dtype=number, device=device) @ weight
    heads = hidden.view(1, TOKENS, HEADS, WIDTH // HEADS).transpose(1, 2)
    mixed = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    torch.nn.functional.silu(mixed).sum().item()  # waits until it has been done


def fetch(base: Path) -> None:
    """Have the kernel read the weights of a base into its page cache, without waiting for it."""
    for weights in base.glob("*.safetensors"):
        with weights.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def __getattr__(name: str) -> type[Extension]:
    """Return `HeldExtension`, the class that vLLM asks for: our extension. The loader is known afterwards."""
    if name != "HeldExtension":
        raise AttributeError(name)
    register()
    return Extension
