"""A Llama in plain torch, float32, one prompt at a time: the reference that engines are held against.

It reads what vLLM and transformers read (`config.json`, safetensors, PEFT adapters) and shares no code with either.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeAlias, cast

from kite.errors import Fault, KiteError, MissingPath

if TYPE_CHECKING:
    from torch import Tensor

Adapters: TypeAlias = Sequence[tuple[Path, float]]
"""Folders of PEFT adapters, each with the weight that multiplies its change of the base."""

ROPE_THETA_DEFAULT = 10_000.0
EPS_DEFAULT = 1e-6
PEFT_PREFIX = "base_model.model."


class UnsupportedModel(KiteError):
    """The base or the adapter uses something that this reference does not compute."""

    code = "unsupported_model"
    fault = Fault.USER


@dataclass(frozen=True, slots=True)
class Shape:
    """What the forward pass needs of `config.json`."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float

    @classmethod
    def read(cls, base: Path) -> Self:
        """Read the folder of a base. Raises UnsupportedModel for scaled rotary embeddings."""
        config = read_json(base / "config.json")
        heads = cast("int", config["num_attention_heads"])
        return cls(
            layers=cast("int", config["num_hidden_layers"]),
            heads=heads,
            kv_heads=cast("int", config.get("num_key_value_heads") or heads),
            head_dim=cast("int", config.get("head_dim") or cast("int", config["hidden_size"]) // heads),
            eps=float(cast("float", config.get("rms_norm_eps", EPS_DEFAULT))),
            theta=rope_theta(config),
        )


class Llama:
    """A base with its weights in memory, float32. Immutable: `merged` gives another one that shares what is equal."""

    def __init__(self, shape: Shape, weights: Mapping[str, "Tensor"]) -> None:
        self.shape = shape
        self.weights = weights

    @classmethod
    def load(cls, base: Path) -> Self:
        """Load the folder of a base. Raises MissingPath or UnsupportedModel."""
        files = sorted(base.glob("*.safetensors"))
        if not files:
            raise MissingPath(f"no safetensors in {base}", hint="name the folder of a base")
        return cls(Shape.read(base), {key: tensor for file in files for key, tensor in tensors(file).items()})

    @property
    def vocab(self) -> int:
        """The number of tokens."""
        return self.weights["model.embed_tokens.weight"].shape[0]

    def merged(self, adapters: Adapters) -> "Llama":
        """Return the model with `W + Σ weight · scale · B·A` in place of each `W` that an adapter names.

        Like vLLM, it passes over tensors that name no module of the base: such an adapter changes nothing.
        Raises UnsupportedModel for an adapter whose scale is not one number.
        """
        weights = dict(self.weights)
        for folder, weight in adapters:
            for module, change in deltas(folder):
                if module in weights:
                    weights[module] = weights[module] + weight * change
        return Llama(self.shape, weights)

    def logits(self, ids: Sequence[int], adapters: Adapters = ()) -> "Tensor":
        """Return the logits [len(ids), vocab] of one prompt, with adapters if any."""
        return self.merged(adapters).forward(ids) if adapters else self.forward(ids)

    def next_logprobs(self, ids: Sequence[int]) -> "Tensor":
        """Return the log-probabilities [vocab], in nats, of the token after the prompt."""
        return self.forward(ids, last_only=True)[-1].log_softmax(-1)

    def forward(self, ids: Sequence[int], *, last_only: bool = False) -> "Tensor":
        """Return logits [len(ids), vocab], or [1, vocab] for the last position only."""
        import torch

        with torch.inference_mode():
            x = self.weights["model.embed_tokens.weight"][torch.tensor(list(ids))]
            rotation = rotations(len(ids), self.shape)
            for layer in range(self.shape.layers):
                x = self._layer(f"model.layers.{layer}.", x, rotation)
            x = self._norm("model.norm", x[-1:] if last_only else x)
            head = self.weights.get("lm_head.weight")
            return x @ (self.weights["model.embed_tokens.weight"] if head is None else head).T

    def _layer(self, name: str, x: "Tensor", rotation: tuple["Tensor", "Tensor"]) -> "Tensor":
        x = x + self._attention(name + "self_attn.", self._norm(name + "input_layernorm", x), rotation)
        return x + self._mlp(name + "mlp.", self._norm(name + "post_attention_layernorm", x))

    def _attention(self, name: str, x: "Tensor", rotation: tuple["Tensor", "Tensor"]) -> "Tensor":
        from torch.nn.functional import scaled_dot_product_attention

        q, k, v = (self._heads(name + part, x) for part in ("q_proj", "k_proj", "v_proj"))
        q, k = rotated(q, rotation), rotated(k, rotation)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self._linear(name + "o_proj", mixed.transpose(0, 1).flatten(1))

    def _mlp(self, name: str, x: "Tensor") -> "Tensor":
        from torch.nn.functional import silu

        return self._linear(
            name + "down_proj", silu(self._linear(name + "gate_proj", x)) * self._linear(name + "up_proj", x)
        )

    def _heads(self, name: str, x: "Tensor") -> "Tensor":
        """Project [n, hidden] to [heads, n, head_dim]."""
        return self._linear(name, x).view(len(x), -1, self.shape.head_dim).transpose(0, 1)

    def _linear(self, name: str, x: "Tensor") -> "Tensor":
        bias = self.weights.get(name + ".bias")
        product = x @ self.weights[name + ".weight"].T
        return product if bias is None else product + bias

    def _norm(self, name: str, x: "Tensor") -> "Tensor":
        scale = (x.square().mean(-1, keepdim=True) + self.shape.eps).rsqrt()
        return self.weights[name + ".weight"] * x * scale


def next_token_logprobs(base: Path, prompts: Sequence[Sequence[int]], adapters: Adapters = ()) -> list["Tensor"]:
    """Return, for each prompt of token ids, the log-probabilities [vocab] of the next token, in nats."""
    model = Llama.load(base).merged(adapters)
    return [model.next_logprobs(prompt) for prompt in prompts]


def deltas(adapter: Path) -> Iterator[tuple[str, "Tensor"]]:
    """Yield, for each module of an adapter, the name of the weight and its change `scale · B·A` [out, in]."""
    scale = lora_scale(read_json(adapter / "adapter_config.json"))
    found = tensors(adapter / "adapter_model.safetensors")
    for key, a in found.items():
        if key.endswith(".lora_A.weight"):
            module = key.removeprefix(PEFT_PREFIX).removesuffix(".lora_A.weight")
            yield f"{module}.weight", scale * (found[key.replace(".lora_A.", ".lora_B.")] @ a)


def lora_scale(config: Mapping[str, object]) -> float:
    """Return `lora_alpha / r`, or `lora_alpha / √r` with rsLoRA. Raises UnsupportedModel for DoRA and patterns."""
    for field in ("use_dora", "rank_pattern", "alpha_pattern"):
        if config.get(field):
            raise UnsupportedModel(f"adapter sets {field}", hint="the reference computes plain LoRA and rsLoRA")
    rank, alpha = float(cast("float", config["r"])), float(cast("float", config["lora_alpha"]))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def rope_theta(config: Mapping[str, object]) -> float:
    """Return the rotary base: `rope_parameters` before the top level. Raises UnsupportedModel for scaled variants."""
    nested = cast("Mapping[str, object]", config.get("rope_parameters") or config.get("rope_scaling") or {})
    if nested.get("rope_type", nested.get("type", "default")) != "default":
        raise UnsupportedModel(f"scaled rotary embeddings {dict(nested)}", hint="take a base with plain ones")
    return float(cast("float", nested.get("rope_theta", config.get("rope_theta", ROPE_THETA_DEFAULT))))


def rotations(length: int, shape: Shape) -> tuple["Tensor", "Tensor"]:
    """Return cosines and sines [length, head_dim] of the rotary embedding."""
    import torch

    powers = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32), shape.theta**-powers).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotated(x: "Tensor", rotation: tuple["Tensor", "Tensor"]) -> "Tensor":
    """Apply the rotary embedding to [heads, n, head_dim]; halves are paired, not neighbours."""
    import torch

    cosines, sines = rotation
    first, second = x.chunk(2, -1)
    return x * cosines + torch.cat((-second, first), -1) * sines


def tensors(file: Path) -> dict[str, "Tensor"]:
    """Read a safetensors file as float32. Raises MissingPath."""
    from safetensors.torch import load

    if not file.is_file():
        raise MissingPath(f"{file} is not there", hint="name the folder of a base or an adapter")
    return {name: tensor.float() for name, tensor in load(file.read_bytes()).items()}


def read_json(file: Path) -> Mapping[str, object]:
    """Read a JSON object. Raises MissingPath."""
    if not file.is_file():
        raise MissingPath(f"{file} is not there", hint="name the folder of a base or an adapter")
    return cast("Mapping[str, object]", json.loads(file.read_text()))
