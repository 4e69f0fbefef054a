"""What a workload raises and warns of."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator


class WorkloadError(ValueError):
    """A data file or a setting that cannot be used: one line that says what, where and the remedy."""


class WorkloadWarning(UserWarning):
    """Data that had to be changed to be run; given once for each file."""


@contextlib.contextmanager
def told_by_workload(told: list[str]) -> Iterator[None]:
    """Collect the WorkloadWarnings of the block in `told`; others go where they always go."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", WorkloadWarning)
        yield
    for one in caught:
        if issubclass(one.category, WorkloadWarning):
            told.append(str(one.message))
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
