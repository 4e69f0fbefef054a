"""What a cache must know of a run beside its own options: its machine, and prefixes known ahead."""

from __future__ import annotations

import numpy as np

from sim.cache_kinds import CacheKind, EquippedPaged, PagedKind
from sim.errors import InputError
from sim.hardware import is_known, load_gpu
from sim.resolve import Resolved
from workloads.streams import Stream, stream_seed

# Assumed: what pinned memory gets of PCIe 4.0 x16, each direction.
HOST_LINK = 25e9  # bytes/s
BEAMS = "parents of beams: each of the present candidates, equally likely and apart from the others"
COPIES = (
    "a copied block is read and written at the GPU's full memory bandwidth, a swapped one moves at "
    f"{HOST_LINK / 1e9:g} GB/s (PCIe 4.0 x16), and no other work hides either"
)
FREE_COPIES = "copied and swapped blocks take no time: how large they are, or how fast the GPU, is not known"


def equipped(resolved: Resolved, seed: np.random.SeedSequence) -> tuple[CacheKind, list[str]]:
    """The scenario's cache ready for its run, and what is assumed for it.

    Raises InputError where prefixes are to be reserved and the workload does not know them, or the
    pool has no room for them.
    """
    kind = resolved.scenario.cache
    if not isinstance(kind, PagedKind):
        return kind, []
    copy_seconds, swap_seconds = _seconds(resolved)
    reserve = kind.reserve_prefixes is not False and resolved.scenario.engine.enable_prefix_caching
    lens, told = _prefixes(resolved, seed, insist=kind.reserve_prefixes is True) if reserve else ((), [])
    ready = EquippedPaged(
        preemption_mode=kind.preemption_mode,
        reserve_prefixes=kind.reserve_prefixes,
        prefix_lens=lens,
        copy_seconds=copy_seconds,
        swap_seconds=swap_seconds,
        seed=int(stream_seed(seed, Stream.BEAMS).generate_state(1)[0]),
    )
    searches = getattr(resolved.scenario.workload, "beam_width", None) != 1  # None: request by request
    assumed = [*told, BEAMS] if searches else told
    return ready, [*assumed, COPIES if swap_seconds > 0 else FREE_COPIES]


def _seconds(resolved: Resolved) -> tuple[float, float]:
    """To copy a block within the GPU, and to move one between GPU and host; 0 where nobody knows."""
    scenario, per_token = resolved.scenario, resolved.kv_bytes_per_token
    if per_token is None or not is_known("gpus", scenario.gpu):
        return 0.0, 0.0
    bandwidth = load_gpu(scenario.gpu).memory_bandwidth
    if bandwidth is None:
        return 0.0, 0.0
    block = per_token * resolved.config.block_size
    return 2 * block / bandwidth, block / HOST_LINK


def _prefixes(
    resolved: Resolved, seed: np.random.SeedSequence, insist: bool
) -> tuple[tuple[int, ...], list[str]]:
    """The tokens to reserve for each prefix group, and what that assumes; none, unless they must be."""
    scenario, config = resolved.scenario, resolved.config
    lens = scenario.workload.group_prefixes(seed)
    if lens is None:
        if not insist:
            return (), []
        raise InputError(
            f"{scenario.name}: cache.reserve_prefixes: workload {scenario.workload.kind} does not know its "
            "prefixes ahead: take shared_prefix, or few_shot with num_groups, or leave it out"
        )
    blocks = int((-(-lens // config.block_size)).sum())
    if blocks >= config.num_gpu_blocks - 1:
        if not insist:
            return (), [f"no prefix is reserved: all would take {blocks} blocks, more than the pool has"]
        raise InputError(
            f"{scenario.name}: cache.reserve_prefixes: prefixes of {len(lens)} groups take {blocks} blocks "
            f"and engine.num_gpu_blocks is {config.num_gpu_blocks}, with the null block: raise it"
        )
    told = f"the KV of {len(lens)} prefixes lies in {blocks} reserved blocks before the run, at no cost"
    return tuple(lens.tolist()), [told]
