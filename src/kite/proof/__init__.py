"""Effect proofs: measured evidence that what an engine serves under a name is what was loaded there.

Everything is measured on next-token distributions, read greedily with one-token completions.
"""

from kite.proof.divergence import Comparison, kl_nats, micronats, partition, summary
from kite.proof.measure import Pair, Reader, noise, read_against, read_both, read_pair, read_side
from kite.proof.prints import Position, Print, PrintDamaged, PrintMissing, PrintUnwritable, recall, record
from kite.proof.prove import Missing, PrintMismatch, Proven, outcome, prove_again, prove_first
from kite.proof.sets import ProbesAltered, ProbesMissing, ProbesUnwritable
from kite.proof.sets import keep as keep_probes
from kite.proof.sets import load as load_probes
from kite.proof.several import Answers, agreement_ppm, apart, count_right, likeliest, read_several

__all__ = [
    "Answers",
    "Comparison",
    "Missing",
    "Pair",
    "Position",
    "Print",
    "PrintDamaged",
    "PrintMismatch",
    "PrintMissing",
    "PrintUnwritable",
    "ProbesAltered",
    "ProbesMissing",
    "ProbesUnwritable",
    "Proven",
    "Reader",
    "agreement_ppm",
    "apart",
    "count_right",
    "keep_probes",
    "kl_nats",
    "likeliest",
    "load_probes",
    "micronats",
    "noise",
    "outcome",
    "partition",
    "prove_again",
    "prove_first",
    "read_against",
    "read_both",
    "read_pair",
    "read_several",
    "read_side",
    "recall",
    "record",
    "summary",
]
