"""How near the simulator is to real engines: one load on two vLLM servers under each policy, recorded by the router,
fitted by `trace fit`, and replayed. Standard library only."""

import argparse
import http.client
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from check import WORDS
from fleet import BLOCK_TOKENS, HOST, MODEL, DEADLINE_SECS, Engine, Failed, call, check, phase, wait_for
from plane import Embedded

POLICIES = {
    "time": [],
    "kv, weight 1": ["--policy", "kv", "--overlap-score-weight", "1"],
    "least-load": ["--policy", "least-load"],
    "round-robin": ["--policy", "round-robin"],
}
FITTED = "time"
"""The policy whose recording gives the profile by which all policies are simulated."""

SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
"""Large enough that an engine's time is the model's."""
CONTEXT_TOKENS = 3072

SYSTEM_PROMPTS, SYSTEM_WORDS = 6, (300, 600)
OPEN_SESSIONS, TURNS, REST_SECS = 44, (2, 7), 4
QUESTION_WORDS, ANSWER_WORDS, ANSWER_TOKENS = (60, 240), (20, 80), (4, 12)


def schedule(given):
    """Chats as (seconds, messages, tokens of the answer): Poisson arrivals, of which each continues a session of
    the open sessions; an ended one is replaced. Earlier answers are given, so that all policies serve the same
    prompts."""
    rng = random.Random(given.seed)

    def words(between):
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(*between)))

    def opened():
        system = systems[min(int(rng.expovariate(0.5)), SYSTEM_PROMPTS - 1)]
        return [{"role": "system", "content": system}]

    systems = [words(SYSTEM_WORDS) for _ in range(SYSTEM_PROMPTS)]
    sessions = [(0.0, rng.randint(*TURNS), opened()) for _ in range(OPEN_SESSIONS)]
    found, at = [], 0.0
    while (at := at + rng.expovariate(given.rate)) < given.secs:
        rested = [place for place, session in enumerate(sessions) if session[0] <= at]
        place = rng.choice(rested or range(OPEN_SESSIONS))
        _, turns, messages = sessions[place]
        if not turns:
            turns, messages = rng.randint(*TURNS), opened()
        if len(messages) > 1:
            messages = [*messages, {"role": "assistant", "content": words(ANSWER_WORDS)}]
        messages = [*messages, {"role": "user", "content": words(QUESTION_WORDS)}]
        sessions[place] = (at + REST_SECS, turns - 1, messages)
        found.append((at, messages, rng.randint(*ANSWER_TOKENS)))
    return found


def ask(port, messages, tokens, failures):
    body = {
        **{"model": MODEL, "messages": messages, "max_tokens": tokens, "ignore_eos": True, "temperature": 0},
        **{"stream": True, "stream_options": {"include_usage": True}},
    }
    connection = http.client.HTTPConnection(HOST, port, timeout=DEADLINE_SECS)
    try:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"}
        )
        response = connection.getresponse()
        raw = response.read()
        if response.status != 200 or b"[DONE]" not in raw:
            failures.append(f"{response.status} {raw[:300]!r}")
    except OSError as error:
        failures.append(str(error))
    finally:
        connection.close()


def offer(port, chats):
    """Sends every chat at its time, whatever became of the earlier ones."""
    failures, threads = [], []
    begin = time.monotonic()
    for at, messages, tokens in chats:
        time.sleep(max(0.0, begin + at - time.monotonic()))
        threads.append(threading.Thread(target=ask, args=(port, messages, tokens, failures)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    check(not failures, f"{len(failures)} requests failed: {failures[:1]}")


def registered(router, engines):
    def done():
        workers = router.admin("/workers")["workers"]
        results = [check["result"] for worker in workers for check in worker["checks"].values()]
        sources = router.sources()
        exact = [name for name, source in sources.items() if source["state"] == "exact"]
        return results and "pending" not in results and len(exact) == len(workers) == len(engines)

    wait_for("the router knows the engines", done)


def directory_of(policy, given):
    return given.logs / f"recording-{policy.replace(', ', '-').replace(' ', '-')}"


def record(policy, chats, engines, given):
    """The load under a policy, from empty caches. Gives the recording's directory."""
    directory = directory_of(policy, given)
    shutil.rmtree(directory, ignore_errors=True)
    for engine in engines:
        wait_for("the reset", lambda port=engine.port: call(port, "POST", "/reset_prefix_cache")[0] == 200)
    settings = f'recording_dir = "{directory}"\n'
    router = Embedded(engines, given, "router", POLICIES[policy], settings)
    try:
        registered(router, engines)
        offer(router.port, chats)
        preempted = sum(engine.metric("vllm:num_preemptions_total") for engine in engines)
        print(f"{policy}: {len(chats)} requests; preemptions so far {preempted:.0f}", flush=True)
    finally:
        router.stop()
    return directory


def run(given, *arguments):
    done = subprocess.run([given.router, *map(str, arguments)], capture_output=True, text=True, check=False)
    check(done.returncode == 0, done.stderr)
    return done.stdout


def fit(policy, directory, given):
    """Fits and replays a recording. Gives the profile's path, and the report."""
    profile = directory.with_suffix(".json")
    profile.unlink(missing_ok=True)
    report = run(given, "trace", "fit", *POLICIES[policy], directory, profile)
    return profile, report


def recorded(report):
    """Mean, median and 99th percentile of the time to first token, and hit rate, as recorded."""
    lines = report.splitlines()
    names = ("TTFT mean, ms", "TTFT p50, ms", "TTFT p99, ms", "hit rate, %")
    return [float(line[len(name) :].split()[0]) for name in names for line in lines if line.startswith(name)]


def simulated(policy, directory, profile, given):
    """The same figures of the recording of FITTED, replayed at its own rate under a policy."""
    converted = given.logs / "converted.jsonl"
    converted.unlink(missing_ok=True)
    run(given, "trace", "convert", directory, converted)
    times = [json.loads(line)["timestamp"] for line in converted.read_text().splitlines()]
    rate = len(times) * 1000 / (max(times) - min(times))
    report = run(
        given,
        *("simulate", "--trace", directory, "--profile-file", profile, "--workers", 2),
        *("--block-size", BLOCK_TOKENS, "--capacity", rate, "--load", 1, "--json", *POLICIES[policy]),
    )
    found = json.loads(report)
    return [found["ttft_mean_ms"], found["ttft_p50_ms"], found["ttft_p99_ms"], 100 * found["hit_rate"]]


def compare(directories, given):
    reports = {}
    for policy, directory in directories.items():
        phase(f"trace fit of the recording under {policy}")
        profile, reports[policy] = fit(policy, directory, given)
        print(reports[policy].rstrip(), flush=True)
        if policy == FITTED:
            fitted = profile
    phase(f"all policies by the recording and the profile of {FITTED}")
    print("| policy | mean TTFT, ms | p50 | p99 | hit rate, % | error of the mean | of the hit rate, points |")
    print("|---|---|---|---|---|---|---|")
    orders = []
    for policy in directories:
        real, simulation = recorded(reports[policy]), simulated(policy, directories[FITTED], fitted, given)
        orders.append((real[0], simulation[0], policy))
        cells = [f"{one:.1f} / {other:.1f}" for one, other in zip(real, simulation)]
        errors = f"{100 * (simulation[0] / real[0] - 1):+.1f} % | {simulation[3] - real[3]:+.1f}"
        print(f"| {policy} | {' | '.join(cells)} | {errors} |")
    for name, key in (("recorded", 0), ("simulated", 1)):
        print(f"{name}, best first: {', '.join(row[2] for row in sorted(orders, key=lambda row: row[key]))}")


def options():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="the interpreter of an environment with vLLM")
    parser.add_argument("--model", required=True, help="made by make_model.py")
    parser.add_argument("--other-model", required=True, help="another one")
    parser.add_argument("--form", default="full", help="the model's attention")
    parser.add_argument("--router", required=True, help="the router's binary")
    parser.add_argument("--logs", required=True, type=Path, help="a directory for logs and recordings")
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second")
    parser.add_argument("--secs", type=float, default=200.0, help="length of the load of each policy")
    parser.add_argument("--blocks", type=int, default=561, help="KV blocks of an engine")
    parser.add_argument("--seed", type=int, default=1, help="another one is other traffic")
    parser.add_argument("--record", nargs="*", default=list(POLICIES), help="the policies to record; others are kept")
    return parser.parse_args()


def engine(name, cpu, given):
    made = Engine(name, given)
    made.blocks = given.blocks
    # A core each: one engine's load must not change the other one's speed.
    made.cpus = {cpu}
    # All that an engine publishes, for a router that starts later.
    made.buffer_steps = 1_000_000
    made.flags = [
        *("--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", "256"),
        *("--hf-overrides", json.dumps(SHAPE)),
    ]
    return made


def main():
    given = options()
    given.logs.mkdir(parents=True, exist_ok=True)
    given.logs = given.logs.resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    cpus = sorted(os.sched_getaffinity(0))
    engines = [engine("engine-a", cpus[0], given), engine("engine-b", cpus[1 % len(cpus)], given)]
    try:
        if given.record:
            phase("starting two vLLM servers")
            for one in engines:
                one.start()
            for one in engines:
                wait_for(f"{one.name} starts", one.is_healthy)
            chats = schedule(given)
            for one in engines:
                offer(one.port, [(0.0, messages, tokens) for _, messages, tokens in chats[:8]])
            phase(f"the load: {given.rate} requests/s for {given.secs} s")
            for policy in given.record:
                record(policy, chats, engines, given)
        compare({policy: directory_of(policy, given) for policy in POLICIES}, given)
    except Failed as failure:
        print(f"\nFAILED: {failure}\nlogs: {given.logs}", file=sys.stderr)
        return 1
    finally:
        for one in engines:
            one.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
