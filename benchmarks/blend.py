"""What blending costs: `python benchmarks/blend.py [--rounds 3]`.

Adapters in the shape of Qwen2.5-7B (28 layers by 7 modules, rank 16, bf16, 81 MB each) are concatenated (2, 3 and 4 of
them) and recompressed to rank 16 (2 and 4), with one thread, from files to a file that is on the disk, the members'
digests checked. The floor is the time to read the same inputs and to write and sync as many bytes, in the same rounds;
the checked floor hashes the inputs as well, as every blend must. Errors are held against dense products and SVDs in
double precision. PEFT's `svd` and `cat` run on one layer, the 3 584 by 3 584 of `q_proj`; the figures for all 196
modules are extrapolated: `svd` as if each were one of these (most are larger), `cat` by parameters. The last line is
one JSON object.
"""

import argparse
import hashlib
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import qwen
import torch

from kite.clock import US_PER_S, mono_us
from kite.durable import sync
from kite_upcycle.base import Base
from kite_upcycle.blend import Blend, Member, combine
from kite_upcycle.factors import key
from kite_upcycle.reader import TENSORS_NAME, read
from kite_upcycle.verify import PPM

CAT_MEMBERS, RECOMPRESS_MEMBERS = (2, 3, 4), (2, 4)
CAT_RANK = 64
SCALE = 2.0  # lora_alpha / r of the adapters
WEIGHT_PPM = 200_000
CHUNK_BYTES = 1024 * 1024
CHECKED = tuple(f"model.layers.{layer}.self_attn.k_proj" for layer in (0, 13, 27))
PEFT_LAYER = "self_attn.q_proj"


class Peft(Protocol):
    """What is used of a PEFT model here; PEFT carries no types."""

    def add_weighted_adapter(
        self, adapters: Sequence[str], weights: Sequence[float], name: str, *, combination_type: str, svd_rank: int
    ) -> None:
        """Combine adapters into one more."""
        ...


def seconds(job: Callable[[], object]) -> float:
    """Return how long a job takes."""
    began_us = mono_us()
    job()
    return (mono_us() - began_us) / US_PER_S


def copy(members: Sequence[Member], target: Path, *, hashed: bool) -> None:
    """Read the members' tensors and write them, one after the other, to the disk."""
    buffer, total = bytearray(CHUNK_BYTES), hashlib.sha256()
    with target.open("wb", buffering=0) as written:
        for member in members:
            with (member.path / TENSORS_NAME).open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    if hashed:
                        total.update(memoryview(buffer)[:count])
                    written.write(memoryview(buffer)[:count])
    sync(target)
    target.unlink()


class Bench:
    """The adapters, and the figures so far."""

    def __init__(self, root: Path, rounds: int) -> None:
        self._out = root / "out"
        self._out.mkdir()
        self._rounds = rounds
        self._base = Base.load(qwen.write_base(root / "base"))
        self._members = [
            qwen.write_adapter(root / f"member-{seed}", seed, weight_ppm=WEIGHT_PPM) for seed in range(max(CAT_MEMBERS))
        ]

    def blend(self, count: int, rank: int) -> Blend:
        """Blend the first members into a file that is on the disk."""
        (self._out / TENSORS_NAME).unlink(missing_ok=True)
        made = combine(self._members[:count], self._out, base=self._base, max_lora_rank=rank, residual_max_ppm=PPM)
        sync(self._out / TENSORS_NAME)
        return made

    def medians(self, jobs: dict[str, Callable[[], object]]) -> dict[str, float]:
        """Run the jobs in turn, round by round, so that all meet the same load; return the median of each."""
        taken: dict[str, list[float]] = {name: [] for name in jobs}
        for _ in range(self._rounds):
            for name, job in jobs.items():
                taken[name].append(seconds(job))
        return {name: statistics.median(values) for name, values in taken.items()}

    def timings(self) -> dict[str, object]:
        """Return the figures of time."""
        two = self._members[:2]
        jobs: dict[str, Callable[[], object]] = {
            "floor": lambda: copy(two, self._out / "copy", hashed=False),
            "checked": lambda: copy(two, self._out / "copy", hashed=True),
        }
        jobs |= {f"cat{n}": lambda n=n: self.blend(n, CAT_RANK) for n in CAT_MEMBERS}
        jobs |= {f"recompress{n}": lambda n=n: self.blend(n, qwen.RANK) for n in RECOMPRESS_MEMBERS}
        found = self.medians(jobs)
        return {
            "cat_s": {str(n): round(found[f"cat{n}"], 3) for n in CAT_MEMBERS},
            "recompress_s": {str(n): round(found[f"recompress{n}"], 3) for n in RECOMPRESS_MEMBERS},
            "io_floor_s": round(found["floor"], 3),
            "checked_floor_s": round(found["checked"], 3),
            "cat_over_floor": round(found["cat2"] / found["floor"], 2),
            "cat_over_checked_floor": round(found["cat2"] / found["checked"], 2),
        }

    def errors(self) -> dict[str, object]:
        """Return the largest relative error of a concatenation, and a recompression's beyond the best one."""
        self.blend(2, CAT_RANK)
        cat = max(self._error(module) for module in CHECKED)
        self.blend(2, qwen.RANK)
        excess = max(self._error(module) - self._best(module) for module in CHECKED)
        return {"cat_error": float(f"{cat:.2e}"), "recompress_excess_error": float(f"{excess:.2e}")}

    def _error(self, module: str) -> float:
        exact = self._exact(module)
        return norm(product(self._out, module) - exact) / norm(exact)

    def _best(self, module: str) -> float:
        exact = self._exact(module)
        dropped = np.linalg.svd(exact.numpy(), compute_uv=False)[qwen.RANK :]
        return float(np.sqrt(np.square(dropped).sum())) / norm(exact)

    def _exact(self, module: str) -> torch.Tensor:
        first, second = (product(member.path, module) for member in self._members[:2])
        return WEIGHT_PPM / PPM * SCALE * (first + second)


def product(folder: Path, module: str) -> torch.Tensor:
    """Return B·A of a module in double precision, without its scale."""
    with read(folder) as adapter:
        a, b = (adapter.tensors.load(key(module, side)).double() for side in "AB")
        return b @ a


def norm(matrix: torch.Tensor) -> float:
    """Return the Frobenius norm."""
    return float(matrix.square().sum().sqrt())


def peft() -> dict[str, object]:
    """Return what PEFT takes for one layer, and what that comes to for all."""
    import peft as library

    out_features, in_features = qwen.MODULES[PEFT_LAYER]
    model = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(in_features, out_features, bias=False)})
    config = library.LoraConfig(
        r=qwen.RANK, lora_alpha=2 * qwen.RANK, target_modules=["q_proj"], init_lora_weights=False
    )
    wrapped = library.get_peft_model(model, config, adapter_name="first")  # pyright: ignore[reportArgumentType, reportUnknownMemberType] # any module will do
    wrapped.add_adapter("second", config)
    adapters = cast("Peft", wrapped)

    def add(kind: str) -> float:
        return seconds(
            lambda: adapters.add_weighted_adapter(
                ["first", "second"], [0.5, 0.5], kind, combination_type=kind, svd_rank=qwen.RANK
            )
        )

    with torch.no_grad():
        svd_s, cat_s = add("svd"), add("cat")
    everything, one = sum(map(sum, qwen.paths().values())), out_features + in_features
    return {
        "peft_svd_layer_s": round(svd_s, 2),
        "peft_svd_s_extrapolated": round(svd_s * len(qwen.paths())),
        "peft_cat_s": round(cat_s * everything / one, 2),
    }


def measure(rounds: int) -> dict[str, object]:
    """Return all figures."""
    before_mb = qwen.resident_mb()
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name), rounds)
        with qwen.Peak() as peak:
            timings = bench.timings()
        result = timings | bench.errors()
    result["peak_mb"] = round(peak.mb - before_mb, 1)
    result |= peft()
    recompressed_s = cast("dict[str, float]", result["recompress_s"])["2"]
    result["ratio_peft_svd"] = round(cast("float", result["peft_svd_s_extrapolated"]) / recompressed_s)
    return result | {"load_1m": round(os.getloadavg()[0], 1)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    torch.set_num_threads(1)
    print(json.dumps(measure(parser.parse_args().rounds)))


if __name__ == "__main__":
    main()
