"""What the recorder takes of a step at 256 running requests, over the stand-in for vLLM.

python tests/time_recorder.py
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import fake_vllm

fake_vllm.install()

from sim.integrations.vllm_recorder import RecordingScheduler  # noqa: E402  (over the stand-in)

RUNNING, STEPS, PROMPT = 256, 600, 500


def microseconds(answer: int) -> tuple[float, float]:
    """Of the recorder a step, and requests that come a step, with answers of 1 to `answer` tokens."""
    rng = random.Random(0)
    config = fake_vllm.config(num_blocks=20_000, max_num_seqs=RUNNING)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PREFIXSIM_RECORDING"] = f"{folder}/recording.jsonl.gz"
        scheduler = RecordingScheduler(vllm_config=config)
        come = 0

        def fill() -> None:
            nonlocal come
            while len(scheduler.requests) < RUNNING:
                prompt = [rng.randrange(32000) for _ in range(PROMPT)]
                scheduler.add_request(fake_vllm.Request(f"r{come}", prompt, rng.randrange(1, answer)))
                come += 1

        fill()
        fake_vllm.step(scheduler)
        before, spent = come, scheduler._recording.spent_ns
        for _ in range(STEPS):
            fill()
            fake_vllm.step(scheduler)
        spent = scheduler._recording.spent_ns - spent
        scheduler.shutdown()
    return spent / STEPS / 1e3, (come - before) / STEPS


if __name__ == "__main__":
    for answer in 400, 4_000_000:
        took, come = microseconds(answer)
        print(f"{took:.0f} us a step, {come:.2f} requests of {PROMPT} tokens a step come and go")
