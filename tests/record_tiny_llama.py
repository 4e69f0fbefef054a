"""Serve a tiny Llama of random weights on a real vLLM with the recorder; run by vLLM's interpreter.

    PREFIXSIM_RECORDING=FILE python record_tiny_llama.py SCHEDULER LOAD [NUM_REQUESTS]

SCHEDULER is a class of sim.integrations.vllm_recorder. LOAD is `preempt` (shared prefixes, long answers, a
pool that is too small), `turns` (conversations whose history holds the real answers), `mixed` (salts, stop
tokens, aborts and resets of the cache) or `priority` (the same under that policy, with nothing preempted:
vLLM 0.32 decides otherwise than 0.33 where a request preempts itself).
"""

import asyncio
import json
import os
import random
import sys
import tempfile
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "vocab_size": 32000,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def engine(folder, scheduler, load):
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    Path(folder, "config.json").write_text(json.dumps(LLAMA))
    args = AsyncEngineArgs(
        model=str(folder),
        served_model_name="tiny-llama",
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        scheduler_cls=f"sim.integrations.vllm_recorder.{scheduler}",
        kv_cache_memory_bytes=1 << 28,
        block_size=32,
        num_gpu_blocks_override={"preempt": 60, "turns": 64, "mixed": 60, "priority": 150}[load],
        max_num_seqs=16,
        max_num_batched_tokens=256,
        max_model_len=1024,
        scheduling_policy="priority" if load == "priority" else "fcfs",
    )
    return AsyncLLM.from_engine_args(args)


def tokens(rng, count):
    return [rng.randrange(10, 32000) for _ in range(count)]


async def generate(llm, name, prompt, max_tokens, **more):
    from vllm import SamplingParams

    stop = more.pop("stop_token_ids", None)
    asked = SamplingParams(
        max_tokens=max_tokens, temperature=1.0, ignore_eos=True, detokenize=False, stop_token_ids=stop
    )
    answer = []
    async for output in llm.generate(
        {"prompt_token_ids": prompt} | more.pop("inputs", {}), asked, name, **more
    ):
        answer = output.outputs[0].token_ids
    return answer


async def preempt(llm, rng, count):
    prefixes = [tokens(rng, n) for n in (100, 150, 70)]
    waiting = []
    for i in range(count):
        prompt = rng.choice(prefixes) + tokens(rng, rng.randrange(5, 60))
        waiting.append(asyncio.create_task(generate(llm, f"p{i}", prompt, rng.randrange(20, 140))))
        await asyncio.sleep(rng.expovariate(20))
    await asyncio.gather(*waiting)


async def turns(llm, rng, count):
    system = tokens(rng, 90)

    async def talk(conversation):
        history = list(system)
        for turn in range(4):
            await asyncio.sleep(rng.expovariate(2))
            history += tokens(rng, rng.randrange(10, 60))
            history += await generate(llm, f"c{conversation}t{turn}", history, rng.randrange(10, 40))

    await asyncio.gather(*(talk(i) for i in range(count // 4)))


async def mixed(llm, rng, count):
    prefixes = [tokens(rng, n) for n in (100, 150, 70)]
    waiting = []
    for i in range(count):
        prompt = rng.choice(prefixes) + tokens(rng, rng.randrange(5, 60))
        inputs = {"cache_salt": rng.choice("ab")} if rng.random() < 0.4 else {}
        stops = tokens(rng, 2000) if rng.random() < 0.3 else None
        more = {"inputs": inputs, "stop_token_ids": stops, "priority": rng.randrange(3)}
        waiting.append(asyncio.create_task(generate(llm, f"m{i}", prompt, rng.randrange(20, 140), **more)))
        if i % 12 == 5:
            waiting.pop(rng.randrange(len(waiting))).cancel()
        if i == count // 2:
            await llm.reset_prefix_cache()
        await asyncio.sleep(rng.expovariate(20))
    await asyncio.gather(*waiting, return_exceptions=True)
    await llm.reset_prefix_cache()
    await generate(llm, "last", prefixes[0], 3)


LOADS = {"preempt": preempt, "turns": turns, "mixed": mixed, "priority": mixed}


async def serve(scheduler, load, count):
    with tempfile.TemporaryDirectory() as folder:
        llm = engine(folder, scheduler, load)
        try:
            await LOADS[load](llm, random.Random(7), count)
        finally:
            llm.shutdown()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 100))
