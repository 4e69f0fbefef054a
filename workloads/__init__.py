"""Traffic for the simulator: synthetic workloads and traces, as columns of requests."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from workloads.agent import Agent
from workloads.documents import Documents
from workloads.errors import WorkloadError, WorkloadWarning
from workloads.few_shot import FewShot
from workloads.fourteen_tokens import FourteenTokens
from workloads.mix import Mix
from workloads.multi_turn import MultiTurn
from workloads.recording import Recording
from workloads.scan import Scan
from workloads.session import SessionWorkload
from workloads.shared_prefix import SharedPrefix
from workloads.trace import Trace
from workloads.tree import Tree

AnyWorkload = Annotated[
    Agent
    | Documents
    | FewShot
    | FourteenTokens
    | Mix
    | MultiTurn
    | Recording
    | Scan
    | SharedPrefix
    | Trace
    | Tree,
    Field(discriminator="kind"),
]

__all__ = [
    "Agent",
    "AnyWorkload",
    "Documents",
    "FewShot",
    "FourteenTokens",
    "Mix",
    "MultiTurn",
    "Recording",
    "Scan",
    "SessionWorkload",
    "SharedPrefix",
    "Trace",
    "Tree",
    "WorkloadError",
    "WorkloadWarning",
]
