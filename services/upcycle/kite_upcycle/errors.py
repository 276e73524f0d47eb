"""What can go wrong with an order of upcycle's; each becomes the code of its failure."""

from pathlib import Path
from typing import ClassVar

from kite.errors import Fault, KiteError
from kite_schemas.upcycle import Resident
from kite_upcycle import core


class BaseChanged(KiteError):
    """The base's files are not those that the policy names, so that nothing can be held against them."""

    code: ClassVar[str] = core.BASE_MISMATCH
    fault: ClassVar[Fault] = Fault.OPERATOR

    def __init__(self, path: str, expected: str, found: str) -> None:
        super().__init__(
            f"base {path} has digest {found}, not {expected}",
            hint="put the base back, or give the pool the digest of the one that its instances serve",
        )
        self.expected = expected
        self.found = found


class MemberUnreadable(KiteError):
    """An adapter's files changed or failed while they were read."""

    code: ClassVar[str] = "adapter_unreadable"
    fault: ClassVar[Fault] = Fault.USER

    def __init__(self, reason: str) -> None:
        super().__init__(f"reading stopped: {reason}", hint="let nothing write to an adapter; check the disk")


class StoreUnusable(KiteError):
    """The store cannot be read or written."""

    code: ClassVar[str] = "store_unusable"
    fault: ClassVar[Fault] = Fault.OPERATOR
    retryable: ClassVar[bool] = True

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"the store {path} cannot be used: {reason}", hint="upcycle must be able to write there")
        self.path = path


class NotAVersion(KiteError):
    """An order names something to load that is no version of the store."""

    code: ClassVar[str] = "not_a_version"

    def __init__(self, resident: Resident) -> None:
        super().__init__(
            f"{resident.path} is no place of {resident.version} in the store",
            hint="engines are given stored versions only",
        )


class NotListed(KiteError):
    """The engine said 200 OK to a load and does not list the version."""

    code: ClassVar[str] = "not_listed"
    fault: ClassVar[Fault] = Fault.PEER

    def __init__(self, version: str) -> None:
        super().__init__(f"the engine took {version} and does not list it", hint="see the engine's log")


class StillListed(KiteError):
    """The engine said 200 OK to an unload and lists the version still."""

    code: ClassVar[str] = "still_listed"
    fault: ClassVar[Fault] = Fault.PEER

    def __init__(self, version: str) -> None:
        super().__init__(f"the engine still lists {version} after its unload", hint="see the engine's log")


class StillUsed(KiteError):
    """Requests use the version still, although its name is taken away."""

    code: ClassVar[str] = "in_use"
    fault: ClassVar[Fault] = Fault.PEER
    retryable: ClassVar[bool] = True

    def __init__(self, version: str, where: str) -> None:
        super().__init__(f"{version} is in use by {where}", hint="it is tried again once those requests have ended")
        self.version = version
        self.where = where


class RebuiltOtherwise(KiteError):
    """The members no longer give the version that is to be computed again."""

    code: ClassVar[str] = "differs"
    fault: ClassVar[Fault] = Fault.OPERATOR

    def __init__(self, version: str, digest: str) -> None:
        super().__init__(
            f"{version} computed again is {digest[:12]}: its members or the tool have changed",
            hint="inject the members again; this version cannot be had any more",
        )
        self.version = version
        self.digest = digest
