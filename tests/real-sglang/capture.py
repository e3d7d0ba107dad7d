"""Captures the frames of SGLang's publisher without a GPU: its radix cache, event recorder, batches
and ZMQ publisher run as they are; torch, kernels and the scheduler around them are stubs.

    pip download --no-deps sglang==0.5.23 && unzip -q sglang-0.5.23-*.whl -d sglang
    pip install msgspec pyzmq pydantic
    python tests/real-sglang/capture.py sglang publisher-shim/mirror/testdata

A record is: u64 time in ns, u32 frames, then each frame with a u32 length; all big endian. Beside
each live capture the engine's own list is written: the prefixes that its tree holds at the end.
"""

import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import struct
import sys
import time
import types
from array import array
from importlib import import_module
from pathlib import Path
from unittest.mock import MagicMock

import zmq

PAGE = 16
REAL = [
    "sglang.srt.disaggregation.kv_events",
    "sglang.srt.managers.scheduler_components.kv_events_publisher",
    "sglang.srt.utils.network",
    *(
        f"sglang.srt.mem_cache.{name}"
        for name in [
            "base_prefix_cache", "cache_init_params", "cpp_utils.native_hash", "events",
            "evict_policy", "radix_cache", "utils",
        ]
    ),
]


class Tensor(list):
    """The slots of a node's tokens: the tree takes their length, slices and copies."""

    def __getitem__(self, index):
        found = super().__getitem__(index)
        return Tensor(found) if isinstance(index, slice) else found

    def clone(self):
        return Tensor(self)


class Stub(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {}) if name[0].isupper() else MagicMock(name=name)
        setattr(self, name, value)
        return value


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of `REAL` in the wheel, and stubs for everything else that it imports."""

    def __init__(self, wheel):
        self.wheel = wheel

    def find_spec(self, name, path=None, target=None):
        if name in REAL:
            file = self.wheel / (name.replace(".", "/") + ".py")
            return importlib.util.spec_from_file_location(name, file)
        if name.split(".")[0] in ("psutil", "sglang", "torch"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Stub(spec.name)

    def exec_module(self, module):
        pass


def stub(wheel):
    sys.meta_path.insert(0, Stubs(wheel))
    import torch

    torch.empty = lambda *shape, **_: Tensor()
    torch.tensor = lambda values, **_: Tensor(values)
    torch.device = str
    native_hash = import_module("sglang.srt.mem_cache.cpp_utils.native_hash")
    native_hash._load_native_hash_module = lambda: types.SimpleNamespace(get_hash=page_hashes)


def page_hashes(raw, length, width, is_bigram, prior, page):
    """What `cpp_utils/hash_binding.cpp` computes for token ids below 2^32."""
    assert width == 1 and not is_bigram
    hashes = []
    for start in range(0, length, page):
        tokens = raw[start : start + page]
        prior = hashlib.sha256((prior or b"") + struct.pack(f"<{len(tokens)}I", *tokens)).digest()
        hashes.append(prior.hex())
    return hashes


class Rank:
    """One data-parallel rank: SGLang's cache and its scheduler's publisher, and a subscriber."""

    def __init__(self, context, config, rank, ranks):
        module = import_module("sglang.srt.managers.scheduler_components.kv_events_publisher")
        from sglang.srt.mem_cache.radix_cache import RadixCache

        parallel = types.SimpleNamespace(
            pp_rank=0, attn_tp_rank=0, attn_cp_rank=0,
            attn_dp_size=ranks, attn_dp_rank=rank, dp_rank=rank,
        )
        module.get_parallel = lambda: parallel
        sys.modules["sglang.srt.disaggregation.kv_events"].get_parallel = lambda: parallel
        allocator = types.SimpleNamespace(device="cpu", free_segment=lambda *_, **__: None)
        self.cache = RadixCache.create_simulated(
            mock_allocator=allocator, page_size=PAGE, enable_kv_cache_events=True
        )
        self.cache.update_eviction_metrics = lambda *_: None
        self.publisher = module.SchedulerKvEventsPublisher(
            kv_events_config=json.dumps(config), tree_cache=self.cache,
            send_metrics_from_scheduler=None, max_running_requests=1,
            max_total_num_tokens=1, get_stats=None,
        )
        local = self.publisher.local_kv_event_sources(PAGE)[0]
        self.replay_endpoint = local["replay_endpoint"]
        self.live = context.socket(zmq.SUB)
        self.live.setsockopt(zmq.SUBSCRIBE, b"")
        self.live.connect(local["endpoint"])
        # The first batch is the reset at the start: it shows that the subscription is in force.
        self.records = []
        while not self.records:
            self.cache.kv_events.record_all_cleared()
            self.step()

    def insert(self, tokens, **namespace):
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        self.cache.insert(InsertParams(key=RadixKey(array("q", tokens), **namespace)))

    def evict(self, tokens):
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.cache.evict(EvictParams(num_tokens=tokens))

    def step(self):
        """Publishes what the cache recorded, and receives it."""
        self.publisher.publish_kv_events()
        while self.live.poll(300):
            self.records.append(self.live.recv_multipart())

    def held(self):
        """Token ids of each page's prefix that the tree holds, and its salt."""
        prefixes = []

        def visit(node, above):
            for child in node.children.values():
                tokens = above + list(child.key.token_ids)
                ends = range(len(above) + PAGE, len(tokens) + 1, PAGE)
                prefixes.extend([child.key.cache_salt, tokens[:end]] for end in ends)
                visit(child, tokens)

        visit(self.cache.root_node, [])
        return prefixes


def write(file, records):
    with open(file, "wb") as out:
        for frames in records:
            out.write(struct.pack(">QI", time.time_ns(), len(frames)))
            for frame in frames:
                out.write(struct.pack(">I", len(frame)) + frame)


def replay(context, rank, start):
    """All frames of a replay, with its end."""
    dealer = context.socket(zmq.DEALER)
    dealer.connect(rank.replay_endpoint)
    dealer.send_multipart([b"", start.to_bytes(8, "big")])
    records = [dealer.recv_multipart()]
    while records[-1][-2] != b"\xff" * 8:
        records.append(dealer.recv_multipart())
    return records


def tokens(topic, count):
    return [1000 * topic + at for at in range(count)]


def drive(rank, salt):
    """Stores, a branch that splits a node, salts, a partial page, evictions, a reset, and more."""
    rank.insert(tokens(1, 4 * PAGE))
    rank.step()
    rank.insert(tokens(1, 6 * PAGE + 5))
    rank.insert(tokens(1, 2 * PAGE) + tokens(2, 2 * PAGE))
    rank.step()
    rank.insert(tokens(1, 3 * PAGE), cache_salt=salt)
    rank.step()
    rank.evict(4 * PAGE)
    rank.step()
    rank.insert(tokens(1, 8 * PAGE))
    rank.step()
    rank.cache.reset()
    rank.step()
    rank.insert(tokens(3, 5 * PAGE))
    rank.insert(tokens(3, 3 * PAGE) + tokens(4, 4 * PAGE))
    rank.insert(tokens(1, 2 * PAGE), cache_salt=salt)
    rank.step()
    rank.evict(PAGE)
    rank.step()


def main():
    wheel, out = Path(sys.argv[1]), Path(sys.argv[2])
    stub(wheel)
    context = zmq.Context.instance()
    config = {
        "publisher": "zmq", "topic": "kv-events", "bind": True,
        "endpoint": "tcp://127.0.0.1:15700", "replay_endpoint": "tcp://127.0.0.1:15710",
    }
    ranks = [Rank(context, config, rank, 2) for rank in range(2)]
    drive(ranks[0], "tenant-a")
    drive(ranks[1], "tenant-b")
    ranks[1].insert(tokens(5, 3 * PAGE))
    ranks[1].step()
    for rank, live in enumerate(ranks):
        write(out / f"sglang0523_rank{rank}.bin", live.records)
        text = json.dumps(live.held())
        (out / f"sglang0523_rank{rank}.held.json").write_text(text + "\n")
    write(out / "sglang0523_replay.bin", replay(context, ranks[0], 0))


main()
