"""Compares what the router says of real vLLM engines with what these report. Standard library only.

The truth is the cached tokens of each response's `usage`. Before every request the index is given
the time to catch up, so that its credit must be that number exactly: not about, not mostly.
"""

import argparse
import http.client
import json
import random
import signal
import sys
import time
from pathlib import Path

from engine_forms import FORMS
from fleet import (
    BLOCK_TOKENS,
    BLOCKS,
    HOST,
    DEADLINE_SECS,
    MODEL,
    Engine,
    Failed,
    cached_tokens,
    call,
    check,
    listed,
    phase,
    wait_for,
)
from plane import FEED_COUNTS, Distributed, Embedded
from scenarios import agents, images, late_start, other_model, other_routes, overload

QUIET_SECS = 0.3
ATTEMPTS = 50
WORDS = """router worker block prefix token cache event batch digest source engine index request stream answer
prompt prefill decode overlap state exact partial replay sequence generation record image fence""".split()


class Checker:
    def __init__(self, router, engines, form):
        self.router = router
        self.form = form
        self.state = "exact"
        self.engines = engines
        self.random = random.Random(20)
        self.compared = 0
        self.late = 0
        self.hits = 0
        self.tokens_cached = 0
        self.by_worker = dict.fromkeys((engine.name for engine in engines), 0)

    def add(self, engine):
        """Starts one more engine and registers it."""
        self.engines.append(engine)
        self.by_worker[engine.name] = 0
        engine.start()
        wait_for(f"{engine.name} starts", engine.is_healthy)
        self.router.add(engine)
        self.registered()

    # What is sent.

    def words(self, count):
        return " ".join(self.random.choice(WORDS) for _ in range(count))

    def ids(self, count):
        return [self.random.randrange(300, 1000) for _ in range(count)]

    def completion(self, prompt, tokens=4, **more):
        body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **more}
        return self.compare("/v1/completions", body)["choices"][0]["text"]

    def chat(self, messages, tokens=8, **more):
        body = {"messages": messages, "max_tokens": tokens, "ignore_eos": True, **more}
        return self.compare("/v1/chat/completions", body)["choices"][0]["message"]["content"]

    # What is compared.

    def settle(self):
        """The index has all that the engines published: proven by a replay that each engine answered after this
        call began, and quiet since. Gives the sources."""
        begin = time.monotonic()
        last, since = None, begin

        def settled():
            nonlocal last, since
            sources = self.router.sources()
            feeds = self.router.feeds()
            now = time.monotonic()
            if sources != last:
                last, since = sources, now
            # The engine's publisher wakes up every 0.1 s.
            proofs = [feed["proof_age_ms"] for feed in feeds]
            proven = len(proofs) == sum(engine.ranks for engine in self.engines) and all(
                age is not None and age / 1000 < now - begin - 0.1 for age in proofs
            )
            ranks = sum(engine.ranks for engine in self.engines)
            exact = len(sources) == ranks and all(source["state"] == self.state for source in sources.values())
            return exact and proven and now - since >= QUIET_SECS and sources

        return wait_for("the index catches up", settled)

    def compare(self, path, body):
        """One request to the caught-up router; credit and report must be equal. Sent again where the index did not
        answer within the few milliseconds that it has, as happens on a busy machine."""
        body = {"model": MODEL, "temperature": 0, **body}
        for _ in range(ATTEMPTS):
            self.settle()
            status, headers, raw = call(self.router.port, "POST", path, body)
            check(status == 200, f"{path}: {status} {raw[:500]!r}")
            answer = json.loads(raw)
            if self.agree(headers, answer["usage"], body):
                return answer
        raise Failed("the index does not answer")

    def agree(self, headers, usage, body):
        """Whether the index answered; then it must be right."""
        overlap, worker = (headers.get(f"x-warmroute-{key}") for key in ("overlap-blocks", "worker"))
        state = headers.get("x-warmroute-index-state")
        check(overlap is not None and worker in self.by_worker, f"headers are missing: {headers}")
        self.by_worker[worker] += 1
        # The state is that of the reports, if they give credit.
        if headers["x-warmroute-tier-states"].startswith("gpu=unknown"):
            # Earlier reports of the engine may give credit.
            check(overlap == "0" or headers["x-warmroute-basis"] == "reported", f"credit without a basis: {headers}")
            self.late += 1
            return False
        check(state == self.state, f"the index said {state!r} of a source that is caught up")
        cached = cached_tokens(usage)
        if int(overlap) * BLOCK_TOKENS != cached:
            decision = self.router.admin("/admin/decisions?limit=1")
            raise Failed(
                f"{worker}: credited {overlap} blocks of {BLOCK_TOKENS} tokens, the engine had {cached} tokens: "
                f"{usage}\nrequest: {json.dumps(body)[:2000]}\ndecision: {json.dumps(decision)}"
            )
        self.compared += 1
        self.hits += cached > 0
        self.tokens_cached += cached
        return True

    def credit(self, engine, ids):
        """Tokens of a prompt that the index credits to an engine."""
        body = {"token_ids": ids, "instance_id": engine.name}
        status, _, raw = call(self.router.index_port, "POST", "/query", body)
        check(status == 200, f"/query: {status} {raw[:300]!r}")
        return json.loads(raw)["instances"][engine.name]["gpu"]

    def directly(self, engine, ids):
        """A request that the router does not see."""
        self.complete(engine.port, ids)

    def complete(self, port, ids):
        """A request with nothing compared. Gives headers and usage."""
        body = {"model": MODEL, "prompt": ids, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        status, headers, raw = call(port, "POST", "/v1/completions", body)
        check(status == 200, f"port {port}: {status} {raw[:300]!r}")
        return headers, json.loads(raw)["usage"]

    def report(self):
        print(
            f"{self.compared} requests compared, {self.hits} with cached tokens ({self.tokens_cached});",
            listed(self.by_worker) + f"; {self.late} without an answer of the index" * bool(self.late),
            flush=True,
        )

    # The checks.

    def registration(self):
        phase("registration")
        self.registered()
        for name, source in self.settle().items():
            print(f"{name}: {source['state']}, {source['blocks']} blocks")

    def registered(self):
        """Every router has compared its tokens with those of every engine."""
        for router in self.router.routers():
            workers = wait_for("the checks are done", lambda router=router: self.checked(router))
            for worker in workers:
                results = {name: result["result"] for name, result in worker["checks"].items()}
                check(set(results.values()) == {"passed"}, f"checks failed: {worker['checks']}")
                check(worker["block_size"] == BLOCK_TOKENS, f"block size {worker['block_size']}")
        for worker in workers:
            print(worker["entry"]["worker"], "passed", ", ".join(worker["checks"]))

    def checked(self, router):
        workers = router.admin("/workers")["workers"]
        results = [result for worker in workers for result in worker["checks"].values()]
        done = all(result["result"] != "pending" for result in results)
        return len(workers) == len(self.engines) and done and workers

    def sequential(self):
        phase("credit is what the engine reports")
        system = {"role": "system", "content": self.words(120)}
        for _ in range(6):
            self.chat([system, {"role": "user", "content": self.words(12)}])
        self.chat([system, {"role": "user", "content": "näïve 東京 🚀 <|end_turn|>\n\n\ttabs  and   blanks "}])
        stem = self.words(90)
        for length in (0, 5, 40, 5):
            self.completion(f"{stem} {self.words(length)}")
        # Whole blocks: the engine computes the last one again each time, and stores another copy of it.
        for blocks in (1, 2, 3, 4):
            ids = self.ids(blocks * BLOCK_TOKENS)
            for prompt in (ids, ids, ids, ids + self.ids(1), ids[:-1]):
                self.completion(prompt, tokens=1)
        self.completion(ids + self.ids(7), tokens=3 * BLOCK_TOKENS)
        if self.form != "all-sliding":
            self.salts()
        for _ in range(2):
            messages = [{"role": "system", "content": self.words(30)}]
            for _ in range(6):
                messages.append({"role": "user", "content": self.words(15)})
                # Long enough for blocks that decoding fills.
                content = self.chat(messages, tokens=40)
                messages.append({"role": "assistant", "content": content})
        self.report()
        # How many depends on the tokenizer, which is trained on the documents.
        check(self.hits * 2 >= self.compared, "too few hits to mean anything")
        check(all(self.by_worker.values()), "a worker got nothing")

    def salts(self):
        """Without full attention an event does not show the salt of the blocks that it leaves out."""
        salted = self.ids(5 * BLOCK_TOKENS + 3)
        for salt in ("one", "one", "two", None, "one", None):
            self.completion(salted, **({} if salt is None else {"cache_salt": salt}))
        text = self.words(100)
        for salt in ("one", "one", None):
            more = {} if salt is None else {"cache_salt": salt}
            self.chat([{"role": "user", "content": text}], **more)

    def pressure(self):
        phase("eviction")
        before = [engine.metric("vllm:num_preemptions_total") for engine in self.engines]
        stems = []
        while len(stems) < 14 or not any(self.has_lost(stem) for stem in stems):
            stems.append(self.ids(self.random.randrange(250, 600)))
            self.completion(stems[-1])
            self.settle()
        lost = 0
        for _ in range(16):
            stem = self.random.choice(stems)
            lost += self.has_lost(stem)
            self.completion(stem + self.ids(self.random.randrange(1, 200)))
        print(f"{len(stems)} prompts; {lost} of 16 had lost blocks when they came again")
        self.burst(stems)
        after = [engine.metric("vllm:num_preemptions_total") for engine in self.engines]
        print(f"preemptions during a burst: {sum(after) - sum(before):.0f}; holes: {self.holes()}")
        for stem in stems:
            self.completion(stem)
            self.completion(stem + self.ids(40))
        for name, source in self.settle().items():
            check(source["blocks"] < BLOCKS[self.form], f"{name} cannot hold {source['blocks']} blocks")
        self.report()

    def has_lost(self, prompt):
        held = max(self.credit(engine, prompt) for engine in self.engines)
        return held < len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS

    def burst(self, stems):
        """More at once than fits, twins among them: copies, preemption. The index is behind in it, so nothing is
        compared until afterwards."""
        connections = []
        for number in range(16):
            ids = stems[number // 2 % len(stems)] + [7] * (number // 4 + 1)
            body = {"model": MODEL, "prompt": ids, "max_tokens": 300, "temperature": 0, "ignore_eos": True}
            connection = http.client.HTTPConnection(HOST, self.router.port, timeout=DEADLINE_SECS)
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
            )
            connections.append(connection)
        for connection in connections:
            response = connection.getresponse()
            raw = response.read()
            check(response.status == 200, f"in a burst: {response.status} {raw[:300]!r}")
            connection.close()

    def holes(self):
        """Removed blocks whose descendants are held: the dump lists them as removed after being stored."""
        status, _, raw = call(self.router.index_port, "GET", "/dump")
        check(status == 200, f"/dump: {status}")
        lines = [json.loads(line) for line in raw.splitlines()]
        return sum(len(line["removed"]["blocks"]) for line in lines if "removed" in line)

    def reset(self):
        engine = self.engines[0]
        phase(f"reset of {engine.name}'s cache")
        old = self.ids(4 * BLOCK_TOKENS + 5)
        self.directly(engine, old)
        self.settle()
        check(self.credit(engine, old) == 4 * BLOCK_TOKENS, "what the engine cached unseen is not known")

        def succeeded():
            return call(engine.port, "POST", "/reset_prefix_cache")[0] == 200

        def doubted():
            return self.router.sources().get(engine.name, {}).get("state") == "unverified"

        wait_for("the reset", succeeded)
        # vLLM publishes a reset with its next batch: the shim sees the call, and makes the engine do a step.
        wait_for("the shim sees the reset", doubted)
        source = self.settle()[engine.name]
        check(source["blocks"] == 0, f"{source['blocks']} blocks after a reset of the idle engine")
        check(self.credit(engine, old) == 0, "credit for what was reset")
        print("unverified, then empty, without a client's request")
        self.directly(engine, self.ids(BLOCK_TOKENS + 5))
        source = self.settle()[engine.name]
        check(source["blocks"] == 1, f"{source['blocks']} blocks after a reset and a block")
        for _ in range(3):
            self.completion(old)
        self.report()

    def kill(self):
        engine = self.engines[1]
        phase(f"SIGKILL of {engine.name}, restart in place")
        prompts = [self.ids(3 * BLOCK_TOKENS + 9) for _ in range(3)]
        for prompt in prompts:
            self.directly(engine, prompt)
        old = self.settle()[engine.name]
        for prompt in prompts:
            check(self.credit(engine, prompt) == 3 * BLOCK_TOKENS, "what the engine cached is not known")
        engine.kill()
        served = sum(self.serve_without(engine, prompts) for _ in range(5))
        engine.start()
        while not engine.is_healthy():
            served += self.serve_without(None, prompts)
            time.sleep(0.2)
        # Before the router may have noticed anything: the new life numbers its batches from 0 again.
        for prompt in prompts[:2]:
            self.directly(engine, prompt[:BLOCK_TOKENS] + self.ids(BLOCK_TOKENS))

        def reborn():
            source = self.router.sources().get(engine.name)
            return source and source["generation"] > old["generation"]

        wait_for("a new generation", reborn)
        new = self.settle()[engine.name]
        print(f"{served} requests served during it; generation {old['generation']} -> {new['generation']}")
        for number, prompt in enumerate(prompts):
            held = BLOCK_TOKENS if number < 2 else 0
            credit = self.credit(engine, prompt)
            check(credit == held, f"credit for {credit} tokens, {held} are cached in the new life")

        def usable():
            workers = self.router.admin("/workers")["workers"]
            return all(worker["health"] == "healthy" for worker in workers)

        wait_for("the worker is back", usable)
        before = dict(self.by_worker)
        for prompt in prompts:
            self.completion(prompt)
            self.completion(prompt + self.ids(70))
        for _ in range(40):
            if self.by_worker[engine.name] > before[engine.name]:
                break
            self.completion(self.ids(200))
        check(self.by_worker[engine.name] > before[engine.name], f"{engine.name} gets nothing any more")
        self.report()

    def serve_without(self, dead, prompts):
        """Requests while an engine is away; none may fail. Gives their number."""
        for prompt in prompts:
            headers, _ = self.complete(self.router.port, prompt)
            worker = headers.get("x-warmroute-worker")
            check(dead is None or worker != dead.name, f"{worker} is dead and answered")
        return len(prompts)

    def streams(self):
        phase("streams, and a client that goes away")
        prompt = self.words(80)
        body = {"prompt": prompt, "max_tokens": 24, "ignore_eos": True}
        for _ in range(2):
            self.settle()
            connection, response = self.stream(body)
            events = [line[6:] for line in response.read().splitlines() if line.startswith(b"data: ")]
            connection.close()
            check(events[-1] == b"[DONE]", f"the stream ended with {events[-1]!r}")
            headers = {name.lower(): value for name, value in response.getheaders()}
            self.agree(headers, json.loads(events[-2])["usage"], body)
        before = self.generated()
        tokens = 800
        connection, response = self.stream({"prompt": prompt, "max_tokens": tokens, "ignore_eos": True})
        response.readline()
        check(self.active(), "a stream under way takes no slot")
        # Both hold the socket: only with the last of them is it closed.
        response.close()
        connection.close()
        wait_for("the engines are idle", lambda: not self.running())
        generated = self.generated() - before
        check(generated < tokens, "the engine went on for a client that had gone")
        wait_for("the slots are free", lambda: not self.active())
        print(f"ended at the engine after {generated:.0f} of {tokens} tokens, slots free")
        self.completion(prompt)
        self.report()

    def stream(self, body):
        body = {
            "model": MODEL,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **body,
        }
        connection = http.client.HTTPConnection(HOST, self.router.port, timeout=DEADLINE_SECS)
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
        )
        response = connection.getresponse()
        check(response.status == 200, f"stream: {response.status}")
        return connection, response

    def generated(self):
        """vLLM counts no aborts of clients that went away; the tokens that it did not make show them."""
        return sum(engine.metric("vllm:generation_tokens_total") for engine in self.engines)

    def running(self):
        return sum(
            engine.metric(f"vllm:num_requests_{state}")
            for engine in self.engines
            for state in ("running", "waiting{")
        )

    def active(self):
        """What is under way, as any of the routers sees it."""
        return [source for router in self.router.routers() for source in router.active()]

    def distributed(self):
        """Each part is killed while requests go on; none may fail, and afterwards everything is equal again."""
        plane = self.router
        for name, kill, start in (
            ("an indexer", plane.indexers[0].kill, plane.indexers[0].start),
            ("a shim", plane.shims["engine-a"].kill, plane.shims["engine-a"].start),
            ("nats-server", plane.kill_nats, plane.start_nats),
        ):
            phase(f"SIGKILL of {name}")
            prompts = [self.ids(3 * BLOCK_TOKENS + 9) for _ in range(3)]
            for prompt in prompts:
                self.completion(prompt)
            kill()
            served = sum(self.serve_without(None, prompts) for _ in range(5))
            start()
            begun = time.monotonic()
            self.settle()
            print(f"{served} requests served without it; equal again {time.monotonic() - begun:.1f} s after its start")
            for prompt in prompts:
                self.completion(prompt + self.ids(40))
            self.report()

    def end(self):
        phase("at the end")
        wait_for("the slots are free", lambda: not self.active())
        for feed in self.router.feeds():
            print(f"{feed['worker']}:", listed({name: feed[name] for name in FEED_COUNTS}))
            check(feed["payloads_malformed"] == 0, "an engine's message could not be read")
        self.report()


def options():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="the interpreter that has vLLM")
    parser.add_argument("--model", required=True, help="the model's directory")
    parser.add_argument("--other-model", required=True, help="another one's, with full attention")
    parser.add_argument("--form", required=True, choices=sorted(BLOCKS), help="the model's attention")
    parser.add_argument("--engines", required=True, choices=["plain", *FORMS], help="what they do besides")
    parser.add_argument("--draft-model", help="a model that drafts for the first one")
    parser.add_argument("--lmcache", help="the directory of LMCache's packages")
    parser.add_argument("--router", required=True, help="the router's binary")
    parser.add_argument("--indexer", help="the indexer's; with the next two: over NATS")
    parser.add_argument("--shim", help="the shim's")
    parser.add_argument("--nats-server", help="nats-server's")
    parser.add_argument("--logs", required=True, type=Path, help="a directory for logs")
    return parser.parse_args()


def run(given, engines, routers):
    for engine in engines:
        engine.start()
    for engine in engines:
        wait_for(f"{engine.name} starts", engine.is_healthy)
    is_distributed = given.nats_server is not None
    router = (Distributed if is_distributed else Embedded)(engines, given)
    routers.append(router)
    checker = Checker(router, engines, given.form)
    checker.registration()
    if given.form == "images":
        images(checker)
        checker.end()
        return
    checker.sequential()
    other_routes(checker)
    if given.form == "full":
        agents(checker)
    checker.pressure()
    checker.reset()
    checker.streams()
    overload(checker)
    if given.form == "full":
        late_start(checker, given)
        other_model(checker, given)
    checker.kill()
    if is_distributed:
        checker.distributed()
    checker.end()


def run_form(form, engines, routers):
    """One process before engines of a form."""
    form.prepare()
    routers.append(form)
    engines.extend(form.engines)
    for engine in engines:
        engine.start()
    for engine in engines:
        wait_for(f"{engine.name} starts", engine.is_healthy)
    router = Embedded(engines, form.given, more_settings=form.SETTINGS)
    routers.append(router)
    checker = Checker(router, list(engines), "full")
    form.check(checker)
    checker.end()


def main():
    given = options()
    given.logs.mkdir(parents=True, exist_ok=True)
    # So that whatever ends us ends what we started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    plain = given.engines == "plain"
    engines = [Engine("engine-a", given), Engine("engine-b", given)] if plain else []
    routers = []
    phase("starting vLLM servers and what routes to them")
    try:
        if plain:
            run(given, engines, routers)
        else:
            run_form(FORMS[given.engines](given), engines, routers)
    except Failed as failure:
        print(f"\nFAILED: {failure}\nlogs: {given.logs}", file=sys.stderr)
        return 1
    finally:
        for process in [*routers, *engines]:
            process.stop()
    print("\nall checks passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
