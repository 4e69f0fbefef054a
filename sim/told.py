"""What is warned of in a block of code, collected as lines to show."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def told_warnings(category: type[Warning], told: list[str]) -> Iterator[None]:
    """Collect the warnings of a category that the block gives in `told`; others go where they always go."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", category)
        yield
    for one in caught:
        if issubclass(one.category, category):
            told.append(str(one.message))
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
