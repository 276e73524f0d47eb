"""Probe sets from the command line: checked, kept in the store and registered, and which of them are in force."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kite import probes
from kite.errors import Fault, KiteError, MissingPath, UsageError
from kite.probes import FILE_MAX_BYTES, Probes
from kite.proof import keep_probes, load_probes
from kite_arbitrator.state import State
from kite_cli.asking.following import Story, enter, make
from kite_cli.place import Address, reading
from kite_cli.view import latest
from kite_schemas.envelope import decode
from kite_schemas.policy import Pool
from kite_schemas.probes import Registered


class ProbesUnknown(KiteError):
    """No set that this fleet knows has such a digest, or several have."""

    code = "probes_unknown"
    fault = Fault.USER

    def __init__(self, digest: str, found: int) -> None:
        said = f"{found} probe sets begin" if found else "no probe set begins"
        super().__init__(f"{said} with {digest!r}", hint="`kite probes list` shows them")
        self.digest = digest
        self.found = found


@dataclass(frozen=True, slots=True)
class Known:
    """A set as the ledger knows it, for one base; `pos` is 0 for the shipped one, which nobody registered."""

    base: str
    digest: str
    count: int
    longest_tokens: int | None
    in_force: bool
    pos: int = 0
    at_us: int = 0
    actor: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Checked:
    """A set that fits a base, and its longest probe, where the base's tokenizer is at hand."""

    base: str
    probes: Probes
    longest_tokens: int | None


def check(fleet: Address, file: Path, base: str) -> Checked:
    """Read a file of probes for the instances of a base.

    Raises MissingPath, UsageError for a base that no pool serves, and ProbesInvalid with every line that is no use.
    """
    pools, content = _pools(fleet, base), _bytes(file)
    found = probes.read(content, file.name)
    counts = _counts(pools, found.prompts)
    if counts is None:
        return Checked(base, found, None)
    most = min(pool.spec.max_model_len for pool in pools) - 1  # one token is asked for
    probes.refuse(
        [f"{file.name}:{line}: {count} tokens, {base} takes {most}" for line, count in long(content, counts, most)]
    )
    return Checked(base, found, max(counts))


def long(content: bytes, counts: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Return line and tokens of every probe of a file that has more than so many.

    >>> long(b"short\\n\\na long probe\\n", [1, 3], 2)
    [(3, 3)]
    """
    numbers = (number for number, _ in probes.lines(content.decode()))
    return [(number, count) for number, count in zip(numbers, counts, strict=True) if count > most]


async def register(fleet: Address, checked: Checked, *, reason: str) -> Story:
    """Keep a set in the store and register it for its base; it is in force from its place in the ledger on.

    Raises UsageError without an adapter root, what `keep_probes` raises, and what `enter` raises.
    """
    request = make(
        Registered,
        reason,
        base=checked.base,
        digest=checked.probes.digest,
        path=keep_probes(_root(fleet), checked.probes),
        probes=len(checked.probes.prompts),
        longest_tokens=checked.longest_tokens,
    )
    return await enter(fleet, f"base/{checked.base}", request)


def known(fleet: Address) -> list[Known]:
    """Return every set of every base: the shipped one first, then those that were registered, by time."""
    with reading(fleet) as reader:
        state = latest(reader)
        events = [(row, decode(row.raw).data) for row in reader.find(types=(Registered.TYPE,))]
    found = [_shipped(state, base) for base in _bases(state)]
    newest = {data.base: row.pos for row, data in events if isinstance(data, Registered)}
    for row, data in events:
        if isinstance(data, Registered):
            in_force = newest[data.base] == row.pos and state.probes.get(data.base) == data.digest
            made = (row.pos, row.ledger_us, data.actor, data.reason)
            found.append(Known(data.base, data.digest, data.probes, data.longest_tokens, in_force, *made))
    return sorted(found, key=lambda one: (one.base, one.pos))


def show(fleet: Address, digest: str) -> Probes:
    """Return the set whose digest begins like this. Raises ProbesUnknown and what `load_probes` raises."""
    digests = {probes.default().digest, *(one.digest for one in known(fleet))}
    found = sorted(one for one in digests if one.startswith(digest.lower()))
    if len(found) != 1 or not digest:
        raise ProbesUnknown(digest, len(found))
    shipped = probes.default()
    return shipped if found[0] == shipped.digest else load_probes(_root(fleet), found[0])


def _shipped(state: State, base: str) -> Known:
    shipped = probes.default()
    return Known(base, shipped.digest, len(shipped.prompts), None, in_force=base not in state.probes)


def _bases(state: State) -> list[str]:
    pools = state.policy.fleet.pools if state.policy else ()
    return sorted({pool.spec.served_name for pool in pools} | set(state.probes))


def _pools(fleet: Address, base: str) -> list[Pool]:
    with reading(fleet) as reader:
        state = latest(reader)
    pools = state.policy.fleet.pools if state.policy else ()
    found = [pool for pool in pools if pool.spec.served_name == base]
    if not found:
        hint = f"served: {', '.join(_bases(state)) or 'nothing yet'}"
        raise UsageError(f"no pool of the fleet serves {base!r}", hint=hint)
    return found


def _bytes(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(FILE_MAX_BYTES + 1)
    except OSError as error:
        raise MissingPath(
            f"{file} cannot be read: {error.strerror}", hint="give a text file, one probe a line"
        ) from error


def _counts(pools: Sequence[Pool], prompts: Sequence[str]) -> list[int] | None:
    """Return the tokens of each prompt, None where no tokenizer of the base, or no library for it, is at hand."""
    file = next((path for pool in pools if (path := Path(pool.base_path) / "tokenizer.json").is_file()), None)
    if file is None:
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    tokenizer = Tokenizer.from_file(str(file))
    return [len(tokenizer.encode(prompt).ids) for prompt in prompts]


def _root(fleet: Address) -> Path:
    if fleet.adapter_root is None:
        raise UsageError("the adapter root of the fleet is not known", hint="name --dir, or set KITE_ADAPTER_ROOT")
    return fleet.adapter_root
