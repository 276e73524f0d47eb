"""Trains the example adapters: rank 4 on the q, v and down projections of SmolLM2-135M-Instruct (0.36 % of the base).

    python examples/adapters/train.py credit laundering mood

Plain torch on one core, a few minutes each. Writes a PEFT adapter to `<out>/<task>/` and held-out prompts with the
right next token to `<out>/<task>.jsonl`; says the accuracy on them before and after.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Protocol, cast

import torch
from tasks import TASKS, Case, split
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from kite.testing.adapters import TARGETS, adapter_config, write_adapter
from kite.testing.bases import cache, smollm2
from kite.testing.llama import PEFT_PREFIX

RANK = 4
ALPHA = 8
STEPS = 160
BATCH = 16
LEARNING_RATE = 3e-3
WARMUP_STEPS = 10
HELD_OUT = 64
SAY_EVERY_STEPS = 20


class Lora(nn.Module):
    """A frozen linear layer and the change that is learnt: `W x + alpha/rank · B A x`."""

    def __init__(self, frozen: nn.Linear, random: torch.Generator) -> None:
        super().__init__()
        self.frozen = frozen
        bound = (3 / frozen.in_features) ** 0.5
        self.a = nn.Parameter((torch.rand(RANK, frozen.in_features, generator=random) * 2 - 1) * bound)
        self.b = nn.Parameter(torch.zeros(frozen.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        return self.frozen(x) + linear(linear(x, self.a), self.b) * (ALPHA / RANK)


class Hidden(Protocol):
    """What the body of a transformers model returns."""

    last_hidden_state: Tensor


@dataclass(frozen=True, slots=True)
class Student:
    """The base with its trainable layers."""

    model: nn.Module
    tokenizer: Tokenizer
    layers: Mapping[str, Lora]

    def logits(self, cases: Sequence[Case]) -> Tensor:
        """Return next-token logits [cases, vocab]; padding comes after a prompt, where causal attention ignores it."""
        ids = [self.tokenizer.encode(case.prompt).ids for case in cases]
        longest = max(map(len, ids))
        padded = torch.tensor([line + [0] * (longest - len(line)) for line in ids])
        body = cast("Hidden", self.model.get_submodule("model")(input_ids=padded, use_cache=False))
        last = body.last_hidden_state[torch.arange(len(ids)), torch.tensor([len(line) - 1 for line in ids])]
        return cast("Tensor", self.model.get_submodule("lm_head")(last))

    def answers(self, cases: Sequence[Case]) -> Tensor:
        """Return the right next token ids [cases]."""
        return torch.tensor([answer_id(self.tokenizer, case) for case in cases])


def answer_id(tokenizer: Tokenizer, case: Case) -> int:
    """Return the answer's token; every answer is one."""
    (token,) = tokenizer.encode(case.answer).ids
    return token


def student(base: Path) -> Student:
    """Load the base, freeze it, and put a Lora in place of each target."""
    model = cast("nn.Module", import_module("transformers").LlamaForCausalLM.from_pretrained(base, dtype=torch.float32))
    model.requires_grad_(requires_grad=False)
    random = torch.Generator().manual_seed(0)
    modules = [key.removesuffix(".weight") for key in model.state_dict()]
    targets = [module for module in modules if module.rpartition(".")[2] in TARGETS]
    layers = {name: Lora(cast("nn.Linear", model.get_submodule(name)), random) for name in targets}
    for name, layer in layers.items():
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, layer)
    return Student(model, Tokenizer.from_file(str(base / "tokenizer.json")), layers)


def batches(cases: Sequence[Case], random: Random) -> Iterator[list[Case]]:
    """Yield batches for ever, each answer as often as the others."""
    frequency = Counter(case.answer for case in cases)
    weights = [1 / frequency[case.answer] for case in cases]
    while True:
        yield random.choices(cases, weights, k=BATCH)


def train(pupil: Student, cases: Sequence[Case]) -> None:
    """Train the layers of a student in place."""
    parameters = [p for layer in pupil.layers.values() for p in (layer.a, layer.b)]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    started = time.monotonic()
    for step, batch in zip(range(1, STEPS + 1), batches(cases, Random(0)), strict=False):  # noqa: S311 - repeatable
        loss = cross_entropy(pupil.logits(batch), pupil.answers(batch))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()  # pyright: ignore[reportUnknownMemberType] - its closure is untyped
        schedule.step()
        if step % SAY_EVERY_STEPS == 0:
            say(f"  step {step}/{STEPS}  loss {loss.item():.3f}  {time.monotonic() - started:.0f} s")


def rate(step: int) -> float:
    """Rise over the first steps, then fall to zero in a straight line."""
    return min((step + 1) / WARMUP_STEPS, 1 - step / STEPS)


def accuracy(pupil: Student, cases: Sequence[Case]) -> float:
    """Return the share of prompts whose likeliest next token is the right one."""
    with torch.inference_mode():
        right = [
            (pupil.logits(cases[n : n + BATCH]).argmax(-1) == pupil.answers(cases[n : n + BATCH])).sum().item()
            for n in range(0, len(cases), BATCH)
        ]
    return sum(right) / len(cases)


def save(pupil: Student, cases: Sequence[Case], out: Path, task: str) -> None:
    """Write the adapter, bfloat16, and the held-out prompts."""
    tensors: dict[str, Tensor] = {}
    for name, layer in pupil.layers.items():
        tensors[f"{PEFT_PREFIX}{name}.lora_A.weight"] = layer.a.detach().bfloat16()
        tensors[f"{PEFT_PREFIX}{name}.lora_B.weight"] = layer.b.detach().bfloat16()
    write_adapter(out / task, tensors, adapter_config(RANK, ALPHA, TARGETS))
    lines = [
        {"prompt": case.prompt, "answer": case.answer, "answer_id": answer_id(pupil.tokenizer, case)} for case in cases
    ]
    (out / f"{task}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def say(text: str) -> None:
    """Write a line of progress."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Train the adapters that the command line names."""
    parser = argparse.ArgumentParser(description="train the example adapters")
    parser.add_argument("tasks", nargs="*", choices=[*TASKS], default=[*TASKS], metavar="TASK")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder (default: beside this file)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for task in cast("list[str]", arguments.tasks):
        train_cases, held_out = split(task, HELD_OUT)
        pupil = student(smollm2(cache()))
        say(f"{task}: {len(train_cases)} cases, {len(held_out)} held out")
        before = accuracy(pupil, held_out)
        train(pupil, train_cases)
        save(pupil, held_out, cast("Path", arguments.out), task)
        print(f"{task}: accuracy on {len(held_out)} held-out prompts {before:.3f} -> {accuracy(pupil, held_out):.3f}")


if __name__ == "__main__":
    main()
