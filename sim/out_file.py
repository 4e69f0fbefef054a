"""A file to write: refused before the work if it cannot be, and replaced whole or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from sim.errors import InputError


def check_out(
    out: Path, *, option: str = "--out", inputs: Iterable[Path] = (), endings: Sequence[str] = ()
) -> None:
    """Raise InputError, one line, if `out` cannot become a file. Modifies nothing.

    `option` is what names the file; `inputs` are files that are read, which `out` may not be under
    any name; `endings` those that it may have, any if empty. A symbolic link counts as the file it
    leads to.
    """
    if endings and out.suffix not in endings:
        raise InputError(f"{option} {out}: should end in {' or '.join(endings)}; give another name")
    try:
        target = _target(out)
        if any(path.exists() and target.exists() and path.samefile(target) for path in inputs):
            raise InputError(f"{option} {out}: is a file that is read; give another name")
        if target.is_dir():
            raise InputError(f"{option} {out}: is a folder; name a file in it")
        if target.exists() and not target.is_file():
            raise InputError(f"{option} {out}: is no regular file; give another name")
        if not target.parent.is_dir():
            raise InputError(f"{option} {out}: there is no folder {target.parent}; make it first")
    except OSError as error:
        raise InputError(f"{option} {out}: {reason(error)}; give another name") from None
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise InputError(f"{option} {out}: cannot be written: Permission denied; give another name")


def replace_text(path: Path, text: str) -> None:
    """Write a file of UTF-8 text, as `replace_bytes` does."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all; through a symbolic link to the file it leads to.

    Raises InputError, one line, where it cannot.
    """
    try:
        target = _target(path)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:100]}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(name, 0o644)
            os.replace(name, target)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {reason(error)}") from None


def reason(error: OSError) -> str:
    """What the system says, and the remedy for a full disk. Names no file."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return (error.strerror or str(error)) + ("; free some there" if full else "")


def _target(path: Path) -> Path:
    try:
        return path.resolve()
    except RuntimeError:  # how Python 3.11 and 3.12 tell a loop
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None
