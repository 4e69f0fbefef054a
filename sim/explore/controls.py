"""The page's controls as marimo's widgets, each with a name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import marimo as mo

from sim.explore import address
from sim.explore.address import Controls


def of_prompts(start: Controls) -> tuple[Any, Any, Any]:
    """Shared prefix, prompt length and block size of the 14 tokens."""
    return (
        _slider("shared prefix (tokens)", address.SHARED, start.shared),
        _slider("prompt length (tokens)", address.PROMPTS, start.prompt),
        _slider("block size (tokens)", address.BLOCKS, start.block),
    )


def of_server(start: Controls) -> Any:
    """The server's controls as one widget, whose value has them by the names of address.Controls."""
    each = {
        "workload": _dropdown("workload", address.WORKLOADS, start.workload),
        "cache": _dropdown("cache", address.CACHES, start.cache),
        "prefix": _slider("shared prefix of a request (tokens)", address.PREFIX_LENS, start.prefix),
        "rate": _slider("requests a second", address.RATES, start.rate),
        "block_size": _dropdown(
            "block size of the server",
            {f"{one} tokens": one for one in address.BLOCK_SIZES},
            start.block_size,
        ),
        "pool": _dropdown("pool", {f"{one:,} tokens": one for one in address.POOLS}, start.pool),
        "caching": mo.ui.switch(value=start.caching, label="prefix caching"),
    }
    places = "".join(f"{{{name}}}" for name in each)
    return mo.Html(f'<div class="controls">{places}</div>').batch(**each)


def _slider(name: str, values: range, value: int) -> Any:
    """A slider that tells screen readers its value, which one over listed steps does not."""
    first, last = values[0], values[-1]
    return mo.ui.slider(first, last, values.step, value, label=name, show_value=True, full_width=True)


def _dropdown(name: str, choices: Mapping[str, str | int], value: str | int) -> Any:
    chosen = next(text for text, word in choices.items() if word == value)
    return mo.ui.dropdown(choices, value=chosen, label=name, full_width=True)
