"""`cost: recorded`: the recording's own step times, and a fit of them for steps that it has not."""

from __future__ import annotations

import warnings

import numpy as np

from sim.cost import StepCost, linear_cost
from sim.leader import Leader
from sim.recorded_server import RECORDED
from sim.recorded_steps import recorded_steps
from sim.recording import RecordingWarning, read_steps
from sim.scenario import Scenario
from workloads import Recording


def leader_of(scenario: Scenario) -> Leader | None:
    """What leads the engine through the recorded steps; None where the scenario asks for none.

    A cluster's engines have none either: the recording is of one.
    """
    workload = scenario.workload
    if scenario.cost != RECORDED or scenario.cluster.replicas > 1:
        return None
    assert isinstance(workload, Recording)
    return Leader(recorded_steps(workload.path), workload.order())


def fitted_cost(path: str, max_num_batched_tokens: int) -> StepCost:
    """Least squares of the recorded durations over tokens, KV lengths, sequences and attended pairs.

    A step lasts until the next one begins where it has no pause before it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordingWarning)
        steps = read_steps(path)
    busy = steps.num_tokens > 0
    following = np.append(steps.schedule_start[1:], np.nan)
    goes_on = steps.running + steps.waiting > steps.num_ended
    last = np.where(goes_on & ~np.isnan(following), following, steps.update_end)
    sums = (np.ones(len(busy)), steps.num_tokens, steps.sum_kv, steps.num_seqs, steps.pairs)
    table = np.stack(sums, axis=1)[busy].astype(np.float64)
    seconds = (last - steps.schedule_start)[busy]
    base, token, kv, seq, pair = np.linalg.lstsq(table, seconds)[0].tolist()
    cost = linear_cost(
        base,
        token,
        decode_context_s=kv + pair,  # a decode over k tokens attends to k keys
        seq_s=seq,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    # a prefill of q tokens over c: c + q tokens of KV, q*c + q*q/2 + q/2 pairs
    kv_us, pair_us = kv * 1e6, pair * 1e6
    return cost._replace(a1=kv_us + pair_us / 2, a2=pair_us, a2_context=pair_us, a3=kv_us)
