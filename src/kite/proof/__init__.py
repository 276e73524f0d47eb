"""Effect proofs: measured evidence that what an engine serves under a name is what was loaded there.

Everything is measured on next-token distributions, read greedily with one-token completions.
"""

from kite.proof.divergence import Comparison, kl_nats, micronats, partition, summary
from kite.proof.measure import Pair, Reader, noise, read_both, read_pair
from kite.proof.prints import Position, Print, PrintDamaged, PrintMissing, PrintUnwritable, recall, record
from kite.proof.prove import Missing, PrintMismatch, Proven, outcome, prove_again, prove_first

__all__ = [
    "Comparison",
    "Missing",
    "Pair",
    "Position",
    "Print",
    "PrintDamaged",
    "PrintMismatch",
    "PrintMissing",
    "PrintUnwritable",
    "Proven",
    "Reader",
    "kl_nats",
    "micronats",
    "noise",
    "outcome",
    "partition",
    "prove_again",
    "prove_first",
    "read_both",
    "read_pair",
    "recall",
    "record",
    "summary",
]
