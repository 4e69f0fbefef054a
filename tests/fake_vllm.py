"""A stand-in for vLLM with what the recorder reads of it, so that the recorder is tested without vLLM.

It schedules first come, first served: a whole prompt when a request is admitted, a token a step after that;
the last request is preempted when the pool is empty. `install()` puts it where `import vllm` finds it. Only
the standard library is used: it also runs where nothing else is installed.
"""

from __future__ import annotations

import sys
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

BLOCK = 32


class Pause(IntEnum):
    UNPAUSED = 0
    PAUSED_ALL = 2


class Request:
    def __init__(self, name: str, prompt: list[int], max_tokens: int, stop: int | None = None, **more: Any):
        self.request_id = name
        self.all_token_ids = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.max_tokens = max_tokens
        self.stop = stop  # ends after this many tokens
        self.hit = 0  # tokens that the cache is said to hold
        self.arrival_time = 0.0
        self.priority = 0
        self.cache_salt = None
        self.lora_request = None
        self.mm_features: list[Any] = []
        self.prompt_embeds = None
        self.use_structured_output = False
        self.resumable = False
        self.pooling_params = None
        self.skip_reading_prefix_cache = False
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.blocks: list[Any] = []
        vars(self).update(more)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens


class BlockPool:
    def __init__(self, num_blocks: int):
        self.num_gpu_blocks = num_blocks
        self.free = [SimpleNamespace(block_id=i, keyed=False) for i in range(1, num_blocks)]
        self.free_block_queue = SimpleNamespace(get_all_free_blocks=lambda: list(self.free))

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        taken, self.free = self.free[:num_blocks], self.free[num_blocks:]
        for block in taken:
            self._maybe_evict_cached_block(block)
        return taken

    def _maybe_evict_cached_block(self, block: Any) -> bool:
        was, block.keyed = block.keyed, False
        return was


class Scheduler:
    def __init__(self, vllm_config: Any, **_: Any):
        self.vllm_config = vllm_config
        self.scheduler_config = vllm_config.scheduler_config
        self.cache_config = vllm_config.cache_config
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=vllm_config.groups)
        self.kv_cache_manager = SimpleNamespace(block_pool=BlockPool(vllm_config.num_blocks))
        self.pool = self.kv_cache_manager.block_pool
        self.block_size = self.hash_block_size = BLOCK
        self.max_num_running_reqs = self.max_num_active_reqs = self.scheduler_config.max_num_seqs
        self.max_num_scheduled_tokens, self.max_model_len = 8192, 8192
        self.policy = SimpleNamespace(value="fcfs")
        self.log_stats = True
        self.connector = self.ec_connector = None
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.admitted = [0, 0, 0, 0, 0, 0]  # since the last update, as PrefixCacheStats counts
        self.fails: list[str] = []  # requests whose grammar turns out not to compile
        self.log: list[dict[str, Any]] = []  # what was really decided
        self.is_shut_down = False
        self.second_runner = False  # vLLM's model runner V2 is told of resumed requests as of new ones

    def schedule(self, throttle_prefills: bool = False) -> Any:
        took: list[int] = []
        lost: list[int] = []
        preempted: list[Any] = []
        scheduled: dict[str, int] = {}
        new, resumed = [], []

        def grow(request: Request, tokens: int) -> bool:
            need = -(-(request.num_computed_tokens + tokens) // BLOCK) - len(request.blocks)
            if need > len(self.pool.free):
                return False
            if need > 0:
                lost.extend(b.block_id for b in self.pool.free[:need] if b.keyed)
                blocks = self.pool.get_new_blocks(need)
                took.extend(b.block_id for b in blocks)
                request.blocks += blocks
            return True

        for request in list(self.running):
            while request in self.running and not grow(request, 1):
                victim = self.running.pop()
                preempted.append((victim.request_id, victim.num_computed_tokens, victim.num_output_tokens))
                self._preempt_request(victim, 0.0)
            if request in self.running:
                scheduled[request.request_id] = 1
        while not preempted and self.waiting and len(self.running) < self.max_num_running_reqs:
            request = self.waiting[0]
            request.num_computed_tokens = request.hit
            if not grow(request, request.num_tokens - request.hit):
                request.num_computed_tokens = 0
                break
            self.running.append(self.waiting.pop(0))
            scheduled[request.request_id] = request.num_tokens - request.hit
            (resumed if request.num_preemptions else new).append(request)
            for i, counted in enumerate((1, request.num_tokens, request.hit)):
                self.admitted[i + 3 * (request.num_preemptions > 0)] += counted
        sequence = [(name, n, self.requests[name].num_computed_tokens) for name, n in scheduled.items()]
        for name, n in scheduled.items():
            self.requests[name].num_computed_tokens += n
        decided = {"s": sequence, "new": [(r.request_id, r.hit) for r in new], "pre": preempted}
        decided |= {"res": [(r.request_id, r.hit) for r in resumed], "took": took, "lost": lost}
        self.log.append(decided | {"fr": len(self.pool.free), "q": list(self.get_request_counts())})
        told_as_new = new + resumed if self.second_runner else new
        told_as_resumed = set() if self.second_runner else {r.request_id for r in resumed}
        return SimpleNamespace(
            num_scheduled_tokens=scheduled,
            scheduled_new_reqs=[SimpleNamespace(req_id=r.request_id) for r in told_as_new],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=told_as_resumed),
        )

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        for name in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(name)
            if request is not None and request in self.running:
                request.all_token_ids.append(model_runner_output(request))
                if request.num_output_tokens == min(request.max_tokens, request.stop or request.max_tokens):
                    self.running.remove(request)
                    self._free_request(request)
        if self.fails:
            self.finish_requests(self.fails, "error")
            self.fails = []
        counts, self.admitted = self.admitted, [0, 0, 0, 0, 0, 0]
        names = ("requests", "queries", "hits", "preempted_requests", "preempted_queries", "preempted_hits")
        stats = SimpleNamespace(**dict(zip(names, counts, strict=True)))
        return {0: SimpleNamespace(scheduler_stats=SimpleNamespace(prefix_cache_stats=stats))}

    def add_request(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def finish_requests(self, request_ids: Any, finished_status: Any) -> list[Request]:
        names = list(self.requests) if request_ids is None else request_ids
        found = [self.requests[name] for name in names if name in self.requests]
        for request in found:
            (self.running if request in self.running else self.waiting).remove(request)
            self._free_request(request)
        return found

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        while reset_running_requests and self.running:
            self._preempt_request(self.running.pop(), 0.0, drop_stale_output=True)
        return not self.running

    def set_pause_state(self, pause_state: Any) -> None:
        self.pause_state = pause_state

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting)

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        self._release(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.hit = 0 if request.hit else BLOCK  # the cache is not what it was
        self.waiting.insert(0, request)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> None:
        del self.requests[request.request_id]
        self._release(request)

    def _release(self, request: Request) -> None:
        for block in reversed(request.blocks):
            block.keyed = True
            self.pool.free.append(block)
        request.blocks = []


class AsyncScheduler(Scheduler):
    pass


def config(num_blocks: int = 60, max_num_seqs: int = 8, **changed: Any) -> Any:
    """What vLLM's VllmConfig holds of a server, with some of it changed."""
    spec = SimpleNamespace()
    settings = {
        "num_blocks": num_blocks,
        "groups": [SimpleNamespace(kv_cache_spec=spec)],
        "scheduler_config": SimpleNamespace(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=8192,
            enable_chunked_prefill=True,
            long_prefill_token_threshold=0,
            long_prefill_token_threshold_adaptive=False,
            watermark=0.0,
            scheduler_reserve_full_isl=True,
            prefill_schedule_interval=1,
            async_scheduling=False,
        ),
        "cache_config": SimpleNamespace(
            enable_prefix_caching=True, prefix_caching_hash_algo="sha256", cache_dtype="auto"
        ),
        "model_config": SimpleNamespace(served_model_name="tiny"),
        "device_config": SimpleNamespace(device_type="cpu"),
        "lora_config": None,
        "speculative_config": None,
        "parallel_config": SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1, data_parallel_index=0
        ),
    }
    return SimpleNamespace(**(settings | changed))


def install(modules: Any = sys.modules, version: str = "0.32.0") -> None:
    """Make `import vllm` find this."""
    names = ["vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched"]
    for name in (*names, "vllm.v1.core.sched.scheduler", "vllm.v1.core.sched.async_scheduler"):
        modules[name] = ModuleType(name)
        modules[name].__path__ = []
    modules["vllm"].__version__ = version
    modules["vllm.v1.core.sched.scheduler"].Scheduler = Scheduler
    modules["vllm.v1.core.sched.async_scheduler"].AsyncScheduler = AsyncScheduler


def step(scheduler: Any, token: Any = lambda request: 7) -> bool:
    """One step of a synchronous engine; whether there was anything to do."""
    if not scheduler.requests:
        return False
    scheduler.update_from_output(scheduler.schedule(), token)
    return True
