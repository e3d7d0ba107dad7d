"""Publishes which blocks of its prefix cache an engine of your own holds, for Warmroute's routing.

The rules of blocks, hashes and replays are those of `warmroute_publisher.h`, which is beside this
file in an installed package.
"""

import ctypes
import os
import threading
from array import array
from pathlib import Path

__all__ = ["Publisher", "PublisherError"]

_HASH_MASK = (1 << 64) - 1


class PublisherError(Exception):
    """A call was refused. `code` is the header's."""

    def __init__(self, code, text):
        super().__init__(text)
        self.code = code


class _Options(ctypes.Structure):
    _fields_ = [
        ("events_endpoint", ctypes.c_char_p),
        ("replay_endpoint", ctypes.c_char_p),
        ("dp_rank", ctypes.c_uint32),
        ("block_size", ctypes.c_uint32),
    ]


class _Stored(ctypes.Structure):
    _fields_ = [
        ("block_hashes", ctypes.POINTER(ctypes.c_uint64)),
        ("block_count", ctypes.c_size_t),
        ("token_ids", ctypes.POINTER(ctypes.c_uint32)),
        ("token_count", ctypes.c_size_t),
        ("parent_hash", ctypes.POINTER(ctypes.c_uint64)),
        ("lora_name", ctypes.c_char_p),
        ("cache_salt", ctypes.c_char_p),
    ]


def _load():
    """The library: `LIBWARMROUTE_PUBLISHER`, or the one beside this file."""
    beside = Path(__file__).with_name("libwarmroute_publisher.so")
    library = ctypes.CDLL(os.environ.get("LIBWARMROUTE_PUBLISHER") or str(beside))
    handle, hashes = ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64)
    arguments = {
        "new": [ctypes.POINTER(_Options), ctypes.POINTER(handle)],
        "stored": [handle, ctypes.POINTER(_Stored)],
        "removed": [handle, hashes, ctypes.c_size_t],
        "cleared": [handle],
        "free": [handle],
    }
    for name, types in arguments.items():
        function = getattr(library, f"warmroute_publisher_{name}")
        function.argtypes = types
        function.restype = None if name == "free" else ctypes.c_int
    library.warmroute_error_text.restype = ctypes.c_char_p
    return library


def _hashes(values):
    """64-bit numbers, signed or not."""
    return _values(ctypes.c_uint64, "Q", [value & _HASH_MASK for value in values])


def _values(kind, code, values):
    """A C array. Raises OverflowError for what it cannot hold."""
    values = array(code, values)
    return (kind * len(values)).from_buffer(values) if values else None


def _text(text):
    return None if text is None else text.encode()


class Publisher:
    """The events of one data-parallel rank. Calls may come from several threads.

    `events_endpoint` and `replay_endpoint` are bound, such as `tcp://*:5557`. Without a replay the
    router cannot prove that it saw every event.
    """

    def __init__(self, events_endpoint, replay_endpoint=None, *, block_size, dp_rank=0):
        self._lock = threading.Lock()
        self._handle = ctypes.c_void_p()
        self._library = _load()
        options = _Options(_text(events_endpoint), _text(replay_endpoint), dp_rank, block_size)
        self._call("new", ctypes.byref(options), ctypes.byref(self._handle))

    def stored(self, block_hashes, token_ids, parent_hash=None, *, lora_name=None, cache_salt=None):
        """Consecutive blocks of a prompt, with all their token ids, are held once more."""
        hashes, tokens = _hashes(block_hashes), _values(ctypes.c_uint32, "I", token_ids)
        parent = None if parent_hash is None else ctypes.c_uint64(parent_hash & _HASH_MASK)
        stored = _Stored(
            hashes, len(hashes or ()), tokens, len(tokens or ()),
            None if parent is None else ctypes.pointer(parent), _text(lora_name), _text(cache_salt),
        )
        with self._lock:
            self._call("stored", self._handle, ctypes.byref(stored))

    def removed(self, block_hashes):
        """One copy of each block is gone."""
        hashes = _hashes(block_hashes)
        with self._lock:
            self._call("removed", self._handle, hashes, len(hashes or ()))

    def cleared(self):
        """The whole cache is empty."""
        with self._lock:
            self._call("cleared", self._handle)

    def close(self):
        """Closes the sockets. Later calls raise."""
        with self._lock:
            self._library.warmroute_publisher_free(self._handle)
            self._handle = ctypes.c_void_p()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _call(self, name, *arguments):
        code = getattr(self._library, f"warmroute_publisher_{name}")(*arguments)
        if code != 0:
            raise PublisherError(code, self._library.warmroute_error_text(code).decode())
