"""The bytes of a recording, plain or gzipped, as far as they are there."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

from sim.errors import InputError
from sim.out_file import reason

GZIP = 16 + zlib.MAX_WBITS


def chunks(path: Path) -> Iterator[bytes]:
    """The file's text in pieces; one that was cut off ends where it was. InputError if it cannot be read."""
    try:
        with path.open("rb") as file:
            first = file.read(1 << 16)
            inflate = zlib.decompressobj(GZIP) if first[:2] == b"\x1f\x8b" else None
            data = first
            while data:
                if inflate is None:
                    yield data
                else:
                    yield inflate.decompress(data)
                    while inflate.eof and inflate.unused_data:  # another member
                        rest = inflate.unused_data
                        inflate = zlib.decompressobj(GZIP)
                        yield inflate.decompress(rest)
                data = file.read(1 << 16)
    except zlib.error:
        raise InputError(f"{path}: the gzip stream is damaged; copy the file again") from None
    except OSError as error:
        raise InputError(f"{path}: {reason(error)}; give a recording, plain or gzipped") from None


def text_lines(path: Path) -> Iterator[bytes]:
    """The file's lines with their ends; a last one without was cut off, or is whole."""
    rest: list[bytes] = []
    for chunk in chunks(path):
        *whole, last = chunk.split(b"\n")
        for line in whole:
            yield b"".join([*rest, line, b"\n"])
            rest = []
        rest.append(last)
    if any(rest):
        yield b"".join(rest)
