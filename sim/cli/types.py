"""Values that options of several commands take."""

from __future__ import annotations

from enum import StrEnum


class WeightType(StrEnum):
    bf16 = "bf16"
    fp8 = "fp8"
