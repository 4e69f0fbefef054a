"""What a workload raises and warns of."""

from __future__ import annotations


class WorkloadError(ValueError):
    """A data file or a setting that cannot be used: one line that says what, where and the remedy."""


class WorkloadWarning(UserWarning):
    """Data that had to be changed to be run; given once for each file."""
