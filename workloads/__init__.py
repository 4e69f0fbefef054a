"""Traffic for the simulator: synthetic workloads and traces, as columns of requests."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from workloads.errors import WorkloadError, WorkloadWarning
from workloads.fourteen_tokens import FourteenTokens
from workloads.shared_prefix import SharedPrefix
from workloads.trace import Trace

AnyWorkload = Annotated[FourteenTokens | SharedPrefix | Trace, Field(discriminator="kind")]

__all__ = ["AnyWorkload", "FourteenTokens", "SharedPrefix", "Trace", "WorkloadError", "WorkloadWarning"]
