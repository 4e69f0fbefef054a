"""What a workload raises and warns of."""

from __future__ import annotations

from contextlib import AbstractContextManager

from sim.told import told_warnings


class WorkloadError(ValueError):
    """A data file or a setting that cannot be used: one line that says what, where and the remedy."""


class WorkloadWarning(UserWarning):
    """Data that had to be changed to be run; given once for each file."""


def told_by_workload(told: list[str]) -> AbstractContextManager[None]:
    """Collect the WorkloadWarnings of the block in `told`; others go where they always go."""
    return told_warnings(WorkloadWarning, told)
