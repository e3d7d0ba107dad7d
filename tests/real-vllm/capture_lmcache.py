"""Captures the events of LMCache's multiprocess connector in vLLM's frames, without a GPU.

    PYTHONPATH=DIRECTORY_OF_LMCACHE python capture_lmcache.py publisher-shim/mirror/testdata/lmcache056.bin

LMCache's server module, its worker's adapter and its connector run as they are, over a stub of the
event bus: what they do with the GPU has no part in events. vLLM's classes encode the batches.

Prompt A has 608 tokens (1000 and on), prompt B the first 256 of these and 256 others (5000 and
on); chunks have 256 tokens, blocks 16. Batches: A stored in GPU memory and its two chunks in CPU
memory; A removed from GPU memory; B's second chunk stored; A's second chunk evicted; the
subscription is lost, so that all is withdrawn and announced again.
"""

import struct
import sys
import threading
import time
from types import SimpleNamespace
from unittest.mock import MagicMock

import msgspec
from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from lmcache.integration.vllm.vllm_multi_process_adapter import LMCacheMPWorkerAdapter
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.mp_observability.event import Event, EventType
from lmcache.v1.multiprocess.modules.kv_events import KVEventModule
from lmcache.v1.multiprocess.token_hasher import TokenHasher
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

MODEL = "model"
CHUNK = 256
BLOCK = 16


class Server:
    """LMCache's record of the chunks in CPU memory."""

    def __init__(self):
        bus = SimpleNamespace(
            enabled=True,
            subscribe_drops=lambda _: None,
            subscribe=lambda *_: None,
            dropped_events_count=lambda: 0,
        )
        self.module = KVEventModule(SimpleNamespace(event_bus=bus))
        self.hasher = TokenHasher(chunk_size=CHUNK)

    def stores(self, tokens):
        hashes = self.hasher.compute_chunk_hashes(tokens)
        chunks = [tokens[at : at + CHUNK] for at in range(0, len(hashes) * CHUNK, CHUNK)]
        bound = {
            "chunk_hashes": hashes,
            "token_chunks": chunks,
            "parent_hashes": [None, *hashes[:-1]],
        }
        self.happens(EventType.MP_TOKENS, bound)
        self.happens(EventType.L1_WRITE_FINISHED, self.keys(hashes))
        return hashes

    def evicts(self, hashes):
        self.happens(EventType.L1_KEYS_EVICTED, self.keys(hashes))

    def keys(self, hashes):
        keys = [ObjectKey(chunk_hash=chunk, model_name=MODEL, kv_rank=0) for chunk in hashes]
        return {"keys": keys}

    def happens(self, event_type, metadata):
        self.module._record_kv_event(Event(event_type=event_type, metadata=metadata))


class Worker:
    """The part of vLLM's worker that turns these records into events."""

    def __init__(self, server):
        self.server = server
        self.cursor = 0
        adapter = LMCacheMPWorkerAdapter.__new__(LMCacheMPWorkerAdapter)
        adapter._kv_events_enabled = True
        adapter._kv_events = []
        adapter._kv_event_lock = threading.RLock()
        adapter._kv_event_server_source = True
        adapter._kv_event_subscriber = False
        adapter._kv_event_incarnation = None
        adapter._announced_kv_hashes = set()
        adapter._ensure_heartbeat_started = lambda: None
        adapter.lmcache_tokens_per_chunk = CHUNK
        for metric in ("buffered", "generated", "drained"):
            setattr(adapter, f"_kv_events_{metric}", MagicMock())
        adapter._kv_event_batches = MagicMock()
        adapter._kv_event_resyncs = MagicMock()
        self.connector = LMCacheMPConnector.__new__(LMCacheMPConnector)
        self.connector._enable_kv_events = True
        self.connector.worker_adapter = adapter

    def events(self):
        batch = self.server.module.read_kv_events(MODEL, self.cursor, 1024)
        self.cursor = batch.next_cursor
        self.connector.worker_adapter._apply_kv_event_batch(batch)
        events = self.connector.get_kv_connector_kv_cache_events()
        return events.get_all_events() if events else []

    def loses_subscription(self):
        self.connector.worker_adapter._resync_kv_events("stream_closed")
        self.cursor = 0


def gpu_store(first_hash, tokens):
    blocks = len(tokens) // BLOCK
    return BlockStored(
        block_hashes=list(range(first_hash, first_hash + blocks)),
        parent_block_hash=None,
        token_ids=tokens,
        block_size=BLOCK,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        extra_keys=[None] * blocks,
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )


def batches():
    server = Server()
    worker = Worker(server)
    a = list(range(1000, 1608))
    b = [*a[:CHUNK], *range(5000, 5000 + CHUNK)]
    of_a = server.stores(a)
    yield [gpu_store(1, a), *worker.events()]
    yield [BlockRemoved(block_hashes=list(range(1, 39)), medium="GPU", group_idx=0)]
    server.stores(b)
    yield worker.events()
    server.evicts(of_a[1:2])
    yield worker.events()
    worker.loses_subscription()
    yield worker.events()


def main():
    encoder = msgspec.msgpack.Encoder()
    with open(sys.argv[1], "wb") as capture:
        for number, events in enumerate(batches()):
            batch = KVEventBatch(ts=float(number), events=events, data_parallel_rank=0)
            frames = [b"kv-events", number.to_bytes(8, "big"), encoder.encode(batch)]
            capture.write(struct.pack(">QI", number, len(frames)))
            for frame in frames:
                capture.write(struct.pack(">I", len(frame)) + frame)


if __name__ == "__main__":
    main()
