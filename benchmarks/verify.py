"""What checking an adapter costs: `python benchmarks/verify.py [--rounds 5]`.

An adapter in the shape of Qwen2.5-7B (28 layers by 7 modules, rank 16, bf16, 81 MB) is held against its base with one
thread: header, every tensor (finite, not all zero), digest, and each clause of the contract. Peak memory is what the
process took beyond its imports. The last line is one JSON object.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

import qwen
import torch

from kite.clock import US_PER_S, mono_us
from kite_upcycle.base import Base
from kite_upcycle.verify import Limits, verify

LIMITS = Limits(max_lora_rank=qwen.RANK, params_share_max_ppm=8_000)


def measure(rounds: int) -> dict[str, object]:
    """Return the figures."""
    before_mb = qwen.resident_mb()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        base = Base.load(qwen.write_base(root / "base"))
        member = qwen.write_adapter(root / "adapter", 1, weight_ppm=1)
        taken_s: list[float] = []
        with qwen.Peak() as peak:
            for _ in range(rounds):
                began_us = mono_us()
                report = verify(member.path, base, LIMITS)
                taken_s.append((mono_us() - began_us) / US_PER_S)
                if not report.accepted:
                    raise SystemExit(f"the adapter should be sound: {report.violations[0]}")
        return {
            "verify_81mb_s": round(statistics.median(taken_s), 3),
            "peak_mb": round(max(0.0, peak.mb - before_mb), 1),
            "spread_s": [round(min(taken_s), 3), round(max(taken_s), 3)],
            "load_1m": round(os.getloadavg()[0], 1),
        }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    torch.set_num_threads(1)
    print(json.dumps(measure(parser.parse_args().rounds)))


if __name__ == "__main__":
    main()
