"""What can be wrong with a key file."""

from pathlib import Path

from kite.errors import Fault, KiteError, MissingPath


class KeyFileMissing(MissingPath):
    """There is no key where one was named."""

    code = "key_file_missing"

    def __init__(self, path: Path) -> None:
        super().__init__(f"no key at {path}", hint="`kite key new` makes one; check the setting that names it")
        self.path = path


class KeyFileOpen(KiteError):
    """Others than its owner can read a private key."""

    code = "key_file_open"
    fault = Fault.OPERATOR

    def __init__(self, path: Path, mode: int) -> None:
        super().__init__(f"the private key {path} has mode {mode:04o}: others can read it", hint=f"chmod 600 {path}")
        self.path = path
        self.mode = mode


class KeyFileUnreadable(KiteError):
    """The file is there and cannot be read, or does not hold the kind of key that is wanted."""

    code = "key_file_unreadable"
    fault = Fault.OPERATOR

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(
            f"{path} is no key to use here: {why}",
            hint="`kite key new` writes a private key into the file that it is told, the public one into FILE.pub",
        )
        self.path = path
        self.why = why


class KeyFileExists(KiteError):
    """A new key would replace a file."""

    code = "key_file_exists"
    fault = Fault.USER

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} exists, and no key is ever replaced", hint="name another file")
        self.path = path


class KeyFileUnwritable(KiteError):
    """A new key cannot be kept."""

    code = "key_file_unwritable"
    fault = Fault.OPERATOR

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"cannot write the key {path}: {why}", hint="name a folder that you can write in")
        self.path = path
        self.why = why
