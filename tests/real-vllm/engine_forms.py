"""Engines in forms of their own: data-parallel ranks, drafts, adapters that change place, LMCache's server.

Each form has its engines, and the checks on them. Standard library only.
"""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

from fleet import (
    BLOCK_TOKENS,
    HOST,
    MODEL,
    OTHER_MODEL,
    Engine,
    cached_tokens,
    call,
    check,
    free_ports,
    get,
    phase,
    wait_for,
)
from plane import Embedded
from scenarios import agents, other_routes


class Form:
    SETTINGS = ""

    def __init__(self, given):
        self.given = given
        self.engines = [Engine("engine-a", given)]

    def prepare(self):
        """Starts and writes what the engines need."""

    def stop(self):
        """Stops what `prepare` started."""


class Ranks(Form):
    """One server with two data-parallel ranks."""

    # A client may choose the rank, as at vLLM's own server.
    SETTINGS = 'worker_hint = "follow"\n'

    def __init__(self, given):
        super().__init__(given)
        [engine] = self.engines
        engine.ranks = 2
        engine.flags = ["--data-parallel-size", "2"]

    def check(self, checker):
        checker.registration()
        checker.sequential()
        phase("a client's choice of the rank")
        prompt = checker.ids(6 * BLOCK_TOKENS + 3)
        for rank, cached in ((0, 0), (1, 0), (0, 6), (1, 6)):
            checker.settle()
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}
            headers, usage = sent(checker.router.port, body, {"X-data-parallel-rank": str(rank)})
            check(headers["x-warmroute-dp-rank"] == str(rank), f"rank {rank} was chosen: {headers}")
            found = cached_tokens(usage)
            check(found == cached * BLOCK_TOKENS, f"rank {rank} had {found} tokens, not {cached} blocks")
            checker.agree(headers, usage, body)
        checker.pressure()
        self.forgotten(checker)

    def forgotten(self, checker):
        phase("a router that is not given the number of ranks")
        [engine] = self.engines
        engine.ranks = 1
        late = Embedded([engine], self.given, "router-forgotten")
        try:
            log = self.given.logs / "router-forgotten.log"
            wait_for("it names the ranks", lambda: "set ranks=2 of the worker" in log.read_text())
            check(late.admin("/workers")["workers"] == [], "half of the engine is registered")
        finally:
            late.stop()
            engine.ranks = 2
        print("not registered, and logged with the number")


class Drafts(Form):
    """Speculative decoding."""

    def __init__(self, given):
        super().__init__(given)
        self.engines[0].flags = ["--speculative-config", json.dumps(self.config(given))]

    def check(self, checker):
        checker.registration()
        checker.sequential()
        other_routes(checker)
        agents(checker)
        checker.pressure()
        checker.reset()
        checker.streams()
        accepted = self.engines[0].metric("vllm:spec_decode_num_drafts_total")
        print(f"{accepted:.0f} drafts")
        check(accepted > 0, "nothing was drafted")


class Ngram(Drafts):
    """Drafts from the prompt's own text."""

    def __init__(self, given):
        super().__init__(given)
        # Whether drafts cost a hit its last block is in no event of theirs.
        self.engines[0].assume = ("plain-lookup",)

    @staticmethod
    def config(_):
        return {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}

    def check(self, checker):
        super().check(checker)
        phase("the same engine without an assumption")
        [engine] = self.engines
        engine.assume = ()
        late = Embedded([engine], self.given, "router-careful")
        try:
            states = wait_for("its events", lambda: [source["state"] for source in late.sources().values()])
            wait_for("its state", lambda: [s["state"] for s in late.sources().values()] == ["unverified"])
        finally:
            late.stop()
        print(f"first {states}, then unverified")


class Lookahead(Drafts):
    """EAGLE in vLLM 0.33, whose block hashes cover the tokens behind each block: exact without an assumption."""

    @staticmethod
    def config(given):
        return {"method": "eagle", "model": given.draft_model, "num_speculative_tokens": 2}

    def check(self, checker):
        # Its first block shows how blocks are named.
        checker.directly(self.engines[0], checker.ids(BLOCK_TOKENS + 1))
        super().check(checker)


RANK, LAYERS, HIDDEN = 8, 2, 128


def write_adapter(directory, value):
    """A LoRA adapter of the small model, in the form of PEFT."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    tensors, parts, at = {}, [], 0
    for layer in range(LAYERS):
        of = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        for side, shape in (("A", [RANK, HIDDEN]), ("B", [HIDDEN, RANK])):
            count = shape[0] * shape[1]
            parts.append(struct.pack(f"<{count}f", *([value] * count)))
            tensors[f"{of}.lora_{side}.weight"] = {
                "dtype": "F32",
                "shape": shape,
                "data_offsets": [at, at + 4 * count],
            }
            at += 4 * count
    head = json.dumps(tensors).encode()
    (directory / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + b"".join(parts))


class Adapters(Form):
    """A LoRA adapter that is loaded again under its name, from other paths."""

    NAME = "tuned"

    def __init__(self, given):
        super().__init__(given)
        [engine] = self.engines
        engine.flags = ["--enable-lora", "--max-loras", "2", "--max-cpu-loras", "4", "--max-lora-rank", str(RANK)]
        engine.environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}

    def prepare(self):
        self.paths = [self.given.logs / f"adapter-{number}" for number in range(2)]
        for number, path in enumerate(self.paths):
            write_adapter(path, (number + 1) / 100)

    def check(self, checker):
        checker.registration()
        checker.sequential()
        phase("an adapter, loaded again under its name")
        self.prompts = [checker.ids(5 * BLOCK_TOKENS + 9) for _ in range(3)]
        before = checker.hits
        self.load(checker, 0)
        self.round(checker, held=0)
        self.load(checker, 1)
        self.round(checker, held=0)
        # Its old blocks are found again.
        self.load(checker, 0)
        self.round(checker, held=3)
        self.load(checker, 1, in_place=True)
        self.round(checker, held=3)
        checker.completion(self.prompts[0])
        check(checker.hits - before >= 15, "too few hits to mean anything")
        checker.report()

    def load(self, checker, number, in_place=False):
        [engine] = self.engines
        if not in_place and self.is_served(checker):
            self.change(engine, "unload", {"lora_name": self.NAME})
            wait_for("the adapter is gone", lambda: not self.is_served(checker))
        body = {"lora_name": self.NAME, "lora_path": str(self.paths[number]), "load_inplace": in_place}
        self.change(engine, "load", body)
        wait_for("the adapter is served", lambda: self.is_served(checker))
        print(f"loaded from {self.paths[number].name}{', in place' * in_place}", flush=True)

    @staticmethod
    def change(engine, what, body):
        status, _, raw = call(engine.port, "POST", f"/v1/{what}_lora_adapter", body)
        check(status == 200, f"{what} of the adapter: {status} {raw[:300]!r}")

    def is_served(self, checker):
        models = get(checker.router.port, "/v1/models")["data"]
        return any(model["id"] == self.NAME for model in models)

    def round(self, checker, held):
        """The first store after a load shows its path; until then the former load's blocks count."""
        body = {"model": self.NAME, "prompt": self.prompts[0] + checker.ids(2 * BLOCK_TOKENS), "max_tokens": 1}
        sent(checker.router.port, body)
        for number, prompt in enumerate(self.prompts):
            before = checker.tokens_cached
            checker.completion(prompt, model=self.NAME)
            cached = checker.tokens_cached - before > 0
            # The request above has the first one's blocks.
            check(cached == (number < max(held, 1)), f"prompt {number}: cached {cached}")
            checker.completion(prompt + checker.ids(BLOCK_TOKENS), model=self.NAME)


CHUNK_TOKENS = 2 * BLOCK_TOKENS


class LmCache(Form):
    """Two engines that offload to LMCache servers. On the CPU a server never learns the tokens of its chunks, so that
    it publishes none: a tier that nobody reports. The other server records no events, and its engine publishes chunks
    in its place, but not what the server evicts."""

    def __init__(self, given):
        super().__init__(given)
        other = Engine("engine-other", given)
        other.model, other.served = given.other_model, OTHER_MODEL
        self.engines.append(other)
        self.ports = [free_ports(2) for _ in self.engines]
        self.servers = []
        for engine, (port, _) in zip(self.engines, self.ports):
            engine.python_path = [given.lmcache]
            engine.blocks, engine.context = 33, 1024
            engine.flags = ["--kv-transfer-config", json.dumps(connector(port))]

    def prepare(self):
        for number, (port, http_port) in enumerate(self.ports):
            command = [
                *(self.given.python, "-m", "lmcache.v1.multiprocess.http_server", "--host", HOST),
                *("--port", str(port), "--http-host", HOST, "--http-port", str(http_port)),
                *("--chunk-size", str(CHUNK_TOKENS), "--l1-size-gb", "0.05", "--no-l1-use-lazy"),
                *("--eviction-policy", "LRU", "--supported-transfer-mode", "auto"),
                *(("--kv-event-log-size", "0") if number else ()),
            ]
            environment = {**os.environ, "PYTHONPATH": self.given.lmcache}
            with (self.given.logs / f"lmcache-{number}.log").open("wb") as log:
                self.servers.append(
                    subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
                )
            wait_for("LMCache's server starts", lambda: self.serves(self.servers[-1], http_port))

    def serves(self, server, port):
        check(server.poll() is None, f"LMCache's server ended: see its log in {self.given.logs}")
        try:
            return call(port, "GET", "/healthcheck")[0] == 200
        except OSError:
            return False

    def stop(self):
        for server in self.servers:
            server.terminate()
            server.wait()

    def check(self, checker):
        checker.registration()
        for engine, tier in zip(self.engines, ("partial", "unverified")):
            phase(f"{engine.name}: CPU memory is {tier}")
            self.reported(checker, engine, tier)

    def reported(self, checker, engine, tier):
        """What events do not show, reports give."""
        prompts = [checker.ids(5 * CHUNK_TOKENS + 20 * number + 1) for number in range(10)]
        rounds = [[self.ask(checker, engine, prompt) for prompt in prompts] for _ in range(4)]
        loaded = engine.metric("vllm:external_prefix_cache_hits_total")
        print(f"{loaded:.0f} tokens loaded from LMCache's server")
        check(loaded > 0, "nothing was loaded")
        [tiers] = [
            source["tiers"]
            for worker in checker.router.admin("/workers")["workers"]
            if worker["entry"]["worker"] == engine.name
            for source in worker["sources"]
        ]
        check((tiers["gpu"], tiers["cpu"]) == ("exact", tier), f"tiers: {tiers}")
        for turn, answers in enumerate(rounds):
            right = sum(credit == cached for credit, cached in answers)
            print(f"round {turn}: {right} of {len(answers)} credits are what the engine had: {answers}")
            over = [answer for answer in answers if answer[0] > answer[1]]
            check(not over, f"credit for what is not held: {over}")
        check(all(credit == cached > 0 for credit, cached in rounds[-1]), "reports give no credit")

    @staticmethod
    def ask(checker, engine, prompt):
        """Credited and cached tokens, in whole blocks."""
        checker.settle()
        body = {"model": engine.served, "prompt": prompt, "max_tokens": 1, "ignore_eos": True}
        headers, usage = sent(checker.router.port, body)
        state, basis = headers["x-warmroute-index-state"], headers["x-warmroute-basis"]
        check(basis != "reported" or state == "unverified", f"{state} by reports")
        whole = cached_tokens(usage) // BLOCK_TOKENS
        return int(headers["x-warmroute-overlap-blocks"]) * BLOCK_TOKENS, whole * BLOCK_TOKENS


def connector(port):
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.mp.host": f"tcp://{HOST}", "lmcache.mp.port": port},
    }


def sent(port, body, headers=None):
    """A request with nothing compared. Gives headers and usage."""
    body = {"temperature": 0, **body}
    status, answered, raw = call(port, "POST", "/v1/completions", body, headers)
    check(status == 200, f"{status} {raw[:300]!r}")
    return answered, json.loads(raw)["usage"]


FORMS = {"ranks": Ranks, "ngram": Ngram, "lookahead": Lookahead, "adapters": Adapters, "lmcache": LmCache}
