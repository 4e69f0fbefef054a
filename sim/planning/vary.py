"""What `--vary` says: ranges of whole numbers to search in, lists of values to try each of."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

from sim.compare import split
from sim.errors import InputError

MOST_CHOICES = 1000  # of the lists crossed: each is a whole search
NOT_VARIED = {
    "seed": "every point runs with several seeds; say how many with --seeds",
    "workload.request_rate": "the pace is what plan seeks where no range is given; set it with --set",
    "workload.session_rate": "the pace is what plan seeks where no range is given; set it with --set",
    "workload.time_scale": "the pace is what plan seeks where no range is given; set it with --set",
    "workload.concurrency": "the pace is what plan seeks where no range is given; set it with --set",
}
_RANGE = re.compile(r"([0-9]{1,18})\s*\.\.\s*([0-9]{1,18})")


class Range(NamedTuple):
    """Whole numbers from `low` to `high`, of which the smallest that keeps the promise is sought."""

    path: str
    low: int
    high: int


class Choices(NamedTuple):
    """Values, as YAML writes them, that are tried each."""

    path: str
    values: list[str]


class Varied(NamedTuple):
    """All of `--vary`, in the order given."""

    ranges: tuple[Range, ...]
    lists: tuple[Choices, ...]

    def crossed(self) -> list[tuple[tuple[str, str], ...]]:
        """Every combination of the lists' values, as (path, value); one empty one without lists."""
        paths = [one.path for one in self.lists]
        crossed = itertools.product(*(one.values for one in self.lists))
        return [tuple(zip(paths, values, strict=True)) for values in crossed]


def parse_vary(texts: Sequence[str]) -> Varied:
    """Read `--vary` options; of ranges, `cluster.replicas` comes first. Raises InputError, one line."""
    varied = [_one(text) for text in texts]
    paths = [one.path for one in varied]
    for path in paths:
        if paths.count(path) > 1:
            raise InputError(f"--vary {path}: is varied twice; put all its values into one --vary")
    lists = tuple(one for one in varied if isinstance(one, Choices))
    size = 1
    for one in lists:
        size *= len(one.values)
    if size > MOST_CHOICES:
        raise InputError(f"--vary: the lists make {size:,} combinations; give at most {MOST_CHOICES:,}")
    ranges = [one for one in varied if isinstance(one, Range)]
    ranges.sort(key=lambda one: one.path != "cluster.replicas")
    return Varied(tuple(ranges), lists)


def _one(text: str) -> Range | Choices:
    where = f"--vary {text}"
    path, equals, given = (part.strip() for part in text.partition("="))
    if not equals or not path:
        raise InputError(f"{where}: should read path=low..high or path=value,value")
    if path in NOT_VARIED:
        raise InputError(f"{where}: {NOT_VARIED[path]}")
    if found := _RANGE.fullmatch(given):
        low, high = int(found[1]), int(found[2])
        if low > high:
            raise InputError(f"{where}: the range is reversed; write {path}={high}..{low}")
        return Range(path, low, high)
    if ".." in given and "," not in given:
        raise InputError(f"{where}: a range has two whole numbers, as in {path}=1..16")
    values = split(given)
    if not all(values):
        raise InputError(f"{where}: has no value; write path=low..high or path=value,value")
    if len(values) < 2:
        raise InputError(f"{where}: has one value; set it with --set {text}, or give two or more")
    if len(set(values)) < len(values):
        raise InputError(f"{where}: has a value twice; give different ones")
    return Choices(path, values)
