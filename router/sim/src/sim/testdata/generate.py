"""Writes golden.jsonl: random work for vLLM's own scheduler, and what it did.

Run with the Python of a vLLM 0.32 installation and a directory with any small text model:
    python generate.py MODEL_DIR 30 > golden.jsonl
One line a scenario. Blocks are named by order of first appearance in a store. Every request
generates token 7 until its max_tokens.
"""
import json
import random
import sys

import torch
from vllm.config import (CacheConfig, KVEventsConfig, ModelConfig, SchedulerConfig, VllmConfig)
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

TOKEN = 7


def scheduler(model, shape):
    model_config = ModelConfig(model=model, dtype="float16", max_model_len=1024, seed=0)
    scheduler_config = SchedulerConfig(
        max_num_seqs=shape["max_num_seqs"],
        max_num_batched_tokens=shape["max_num_batched_tokens"],
        max_model_len=1024,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=False,
    )
    cache_config = CacheConfig(
        block_size=shape["block_size"], gpu_memory_utilization=0.9, enable_prefix_caching=True)
    cache_config.num_gpu_blocks = shape["num_blocks"]
    config = VllmConfig(
        model_config=model_config, scheduler_config=scheduler_config, cache_config=cache_config)
    spec = FullAttentionSpec(
        block_size=shape["block_size"], num_kv_heads=1, head_size=1, dtype=torch.float32)
    kv = KVCacheConfig(
        num_blocks=shape["num_blocks"], kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    made = Scheduler(
        vllm_config=config, kv_cache_config=kv, log_stats=True, block_size=shape["block_size"],
        structured_output_manager=StructuredOutputManager(config))
    made.kv_cache_manager.block_pool.enable_kv_cache_events = True
    made.kv_cache_manager.enable_kv_cache_events = True
    return made


class Collector:
    def __init__(self):
        self.events, self.names = [], {}

    def publish(self, batch):
        self.events.extend(self.plain(event) for event in batch.events)

    def shutdown(self):
        pass

    def plain(self, event):
        if isinstance(event, AllBlocksCleared):
            return {"cleared": True}
        if isinstance(event, BlockRemoved):
            return {"removed": [self.names[h] for h in event.block_hashes]}
        assert isinstance(event, BlockStored)
        parent = event.parent_block_hash
        return {
            "stored": [self.names.setdefault(h, len(self.names)) for h in event.block_hashes],
            "parent": None if parent is None else self.names[parent],
            "tokens": list(event.token_ids),
            "keys": [[str(k) for k in keys or []] for keys in event.extra_keys or []],
            "lora": event.lora_name,
        }

    def take(self):
        events, self.events = self.events, []
        return events


def prompt(rng):
    family, length = rng.randrange(3), rng.choice([rng.randrange(1, 40), 8, 12, 16, 24])
    return [t if t < 10 else t + 100 * family for t in range(length)]


def step(made, collector):
    output = made.schedule()
    sampled = []
    for request_id in output.num_scheduled_tokens:
        request = made.requests[request_id]
        sampled.append([TOKEN] if request.num_computed_tokens == request.num_tokens else [])
    ids = list(output.num_scheduled_tokens)
    before = set(made.requests)
    preempted = [r for r in made.requests.values() if r.status == RequestStatus.PREEMPTED]
    results = made.update_from_output(output, ModelRunnerOutput(
        req_ids=ids, req_id_to_index={r: i for i, r in enumerate(ids)},
        sampled_token_ids=sampled))
    cached = {}
    for result in results.values():
        for out in result.outputs:
            if out.prefill_stats is not None:
                cached[out.request_id] = out.prefill_stats.num_cached_tokens
    return {
        "step": {
            "scheduled": output.num_scheduled_tokens,
            "waiting_again": [int(r.request_id) for r in preempted],
            "finished": sorted(int(r) for r in before - set(made.requests)),
            "cached": cached,
            "events": collector.take(),
        }
    }


def scenario(model, seed):
    rng = random.Random(seed)
    shape = {
        "seed": seed, "block_size": 4, "num_blocks": rng.randrange(16, 40),
        "max_num_seqs": rng.randrange(2, 7),
        "max_num_batched_tokens": rng.choice([16, 24, 64]),
    }
    made, collector = scheduler(model, shape), Collector()
    made.kv_event_publisher = collector
    hasher = get_request_block_hasher(4, sha256)
    operations, count, alive = [], 0, []
    for _ in range(70):
        kind = rng.choices(["submit", "step", "abort", "reset"], [4, 10, 1, 1])[0]
        if kind == "submit":
            tokens, most = prompt(rng), rng.randrange(1, 14)
            lora = rng.choice([None, None, None, "adapter"])
            salt = rng.choice([None, None, None, "tenant"])
            if len(tokens) + most > (shape["num_blocks"] - 1) * 4:
                continue
            params = SamplingParams(ignore_eos=True, max_tokens=most)
            params.update_from_generation_config({}, 50256)
            made.add_request(Request(
                request_id=str(count), prompt_token_ids=tokens, sampling_params=params,
                pooling_params=None, cache_salt=salt, block_hasher=hasher,
                lora_request=LoRARequest(lora, 1, "/adapter") if lora else None))
            operations.append({"submit": {
                "prompt": tokens, "max_tokens": most, "lora": lora, "salt": salt}})
            count += 1
        elif kind == "step":
            if made.has_unfinished_requests():
                operations.append(step(made, collector))
        elif kind == "abort" and count:
            victim = rng.randrange(count)
            made.finish_requests(str(victim), RequestStatus.FINISHED_ABORTED)
            operations.append({"abort": victim})
        elif kind == "reset":
            operations.append({"reset": made.reset_prefix_cache()})
    while made.has_unfinished_requests():
        operations.append(step(made, collector))
    return {**shape, "operations": operations}


if __name__ == "__main__":
    init_none_hash(sha256)
    for seed in range(int(sys.argv[2]) if len(sys.argv) > 2 else 40):
        print(json.dumps(scenario(sys.argv[1], seed), separators=(",", ":")))
