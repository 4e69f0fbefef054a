"""How often a run leaves what its calibration measured: there, step times are extrapolated.

A step is known by its sums, so lengths are means: KV tokens a decoding sequence, and new and cached
tokens as a prefill's mean new token meets them.
"""

from __future__ import annotations

from typing import NamedTuple

from sim._jit import hot
from sim.columns import K
from sim.core import Core
from sim.cost import StepCost


class StepsOutside(NamedTuple):
    """Engine steps beyond each bound of the calibration's domain."""

    tokens: int
    decodes: int
    kv_len: int
    decode_kv: int
    query_len: int
    context_len: int


@hot
def note_domain(
    core: Core,
    cost: StepCost,
    num_tokens: int,
    num_decodes: int,
    decode_kv: int,
    prefill_tokens: int,
    prefill_squares: int,
    prefill_cross: int,
) -> None:
    """Count one step where it is outside. The sums are gpu_time's."""
    count = core.count
    if num_tokens > cost.max_tokens:
        count[K.outside_tokens] += 1
    if num_decodes > cost.max_decodes:
        count[K.outside_decodes] += 1
    if decode_kv > cost.max_kv_len * num_decodes or decode_kv < cost.min_kv_len * num_decodes:
        count[K.outside_kv_len] += 1
    if decode_kv > cost.max_decode_kv:
        count[K.outside_decode_kv] += 1
    if prefill_squares > cost.max_query_len * prefill_tokens:
        count[K.outside_query_len] += 1
    if prefill_cross > cost.max_context_len * prefill_tokens:
        count[K.outside_context_len] += 1


def steps_outside(core: Core) -> StepsOutside:
    """The counts so far."""
    count = core.count
    return StepsOutside(
        tokens=int(count[K.outside_tokens]),
        decodes=int(count[K.outside_decodes]),
        kv_len=int(count[K.outside_kv_len]),
        decode_kv=int(count[K.outside_decode_kv]),
        query_len=int(count[K.outside_query_len]),
        context_len=int(count[K.outside_context_len]),
    )


def domain_warnings(outside: StepsOutside, num_steps: int, cost: StepCost) -> list[str]:
    """What a report warns of: one line a bound that was left."""
    kv = f"decodes over fewer than {cost.min_kv_len:,.0f} or more than {cost.max_kv_len:,.0f} KV tokens each"
    reach = {
        "tokens": f"more than {cost.max_tokens:,.0f} tokens",
        "decodes": f"more than {cost.max_decodes:,.0f} decoding sequences",
        "kv_len": kv,
        "decode_kv": f"decodes over more than {cost.max_decode_kv:,.0f} KV tokens in all",
        "query_len": f"prefills of more than {cost.max_query_len:,.0f} new tokens each",
        "context_len": f"prefills over more than {cost.max_context_len:,.0f} cached tokens each",
    }
    if cost.max_context_len == 0:
        del reach["context_len"]  # never measured, so assumed, see with_share_on_kappa
    return [
        f"{_share(getattr(outside, bound), num_steps)} of the steps had {what}, beyond what the calibration "
        "measured: their time is extrapolated"
        for bound, what in reach.items()
        if getattr(outside, bound)
    ]


def with_share_on_kappa(
    assumed: list[str], num_over_context: int, num_requests: int, cost: StepCost
) -> list[str]:
    """What is assumed; of kappa, where prefill over context was not measured, how much rests on it."""
    if cost.max_context_len > 0 or not num_over_context:
        return assumed
    share = 100.0 * num_over_context / num_requests
    bears = f"; the prefill of {share:.1f} % of the requests rests on it"
    return [text + bears if "kappa" in text else text for text in assumed]


def _share(steps: int, num_steps: int) -> str:
    percent = 100.0 * steps / num_steps
    return f"{percent:.1f} %" if percent >= 0.05 else f"{steps} of {num_steps}"
