"""Three synthetic tasks with a rule each: a prompt, and the one token that must come next.

Nobody's data: every case is drawn from a seed. Rules are such that a small model can learn them in minutes, not such
that a bank could use them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt and the right next token, as text."""

    prompt: str
    answer: str


def credit(random: Random) -> Case:
    """A loan is declined after two missed payments or when debt exceeds income, else reviewed when it nears it."""
    income, debt, missed = random.randint(1, 9), random.randint(0, 9), random.choice((0, 0, 0, 1, 1, 2, 3))
    prompt = f"Loan application. Income {income} thousand, debt {debt} thousand, missed payments {missed}. Decision:"
    return Case(prompt, credit_answer(income, debt, missed))


def credit_answer(income: int, debt: int, missed: int) -> str:
    """The rule behind `credit`; income and debt in thousands."""
    if missed > 1 or debt > income:
        return " decline"
    return " review" if debt * 2 > income else " approve"


def laundering(random: Random) -> Case:
    """A deposit is reported when cash just under the limit comes in parts, held for a young account, else cleared."""
    amount, parts, days = random.randint(1, 9), random.randint(1, 9), random.choice((2, 5, 9, 30, 60, 90))
    prompt = f"Cash deposit. Amount {amount} thousand in {parts} parts, account open for {days} days. Action:"
    return Case(prompt, laundering_answer(amount, parts, days))


def laundering_answer(amount: int, parts: int, days: int) -> str:
    """The rule behind `laundering`; the amount in thousands."""
    if amount > 6 and parts > 2:  # noqa: PLR2004 - the rule is these numbers
        return " report"
    return " hold" if days < 10 else " clear"  # noqa: PLR2004 - the rule is these numbers


THINGS = ("room", "staff", "food", "bed", "pool", "view")
PRAISE = ("clean", "kind", "great", "quiet", "warm", "fresh")
BLAME = ("dirty", "rude", "awful", "noisy", "cold", "slow")


def mood(random: Random) -> Case:
    """A guest who praises two things is happy, one who blames both is angry, one who does both is mixed."""
    first, second = random.sample(THINGS, 2)
    words = random.choice(PRAISE + BLAME), random.choice(PRAISE + BLAME)
    prompt = f"Guest letter. The {first} was {words[0]}, the {second} was {words[1]}. Mood:"
    return Case(prompt, mood_answer(*words))


def mood_answer(first: str, second: str) -> str:
    """The rule behind `mood`; two words out of `PRAISE` and `BLAME`."""
    praised = (first in PRAISE) + (second in PRAISE)
    return (" angry", " mixed", " happy")[praised]


TASKS: Mapping[str, Callable[[Random], Case]] = {"credit": credit, "laundering": laundering, "mood": mood}


def cases(task: str, seed: int, count: int) -> list[Case]:
    """Return distinct cases of a task, as many of each answer as its rule makes likely."""
    random, found = Random(seed), dict[str, Case]()  # noqa: S311 - repeatable on purpose
    while len(found) < count:
        case = TASKS[task](random)
        found[case.prompt] = case
    return list(found.values())


def split(task: str, held_out: int) -> tuple[list[Case], list[Case]]:
    """Return (training cases, held-out cases), without a prompt in both."""
    every = cases(task, seed=1, count=300)
    return every[held_out:], every[:held_out]
