"""Makes tools.jsonl and agent.jsonl beside this file."""

import json
import pathlib
import random

PIECE = 512
HERE = pathlib.Path(__file__).parent


def write(name, rows):
    lines = [json.dumps(row, separators=(",", ":")) for row in rows]
    (HERE / name).write_text("\n".join(lines) + "\n")


def ids():
    number = 0
    while True:
        yield number
        number += 1


def request(prompt, rng, **beside):
    return {
        **beside,
        "input_length": len(prompt) * PIECE + rng.randrange(PIECE),
        "output_length": 4 + int(rng.expovariate(1 / 60)),
        "hash_ids": list(prompt),
    }


def tools():
    rng, fresh = random.Random(1), ids()
    systems = [[next(fresh) for _ in range(rng.randrange(2, 10))] for _ in range(12)]
    weights = [1 / (rank + 1) for rank in range(12)]
    talks, rows, at = [], [], 0.0
    for _ in range(400):
        at += rng.expovariate(1 / 100)
        if talks and rng.random() < 0.4:
            prompt = talks[-1 - min(int(rng.expovariate(1 / 8)), len(talks) - 1)]
        else:
            prompt = rng.choices(systems, weights)[0]
        prompt = prompt + [next(fresh) for _ in range(rng.randrange(3))]
        talks.append(prompt)
        rows.append(request(prompt, rng, timestamp=int(at)))
    write("tools.jsonl", rows)


def agent():
    rng, fresh = random.Random(2), ids()
    common = [next(fresh) for _ in range(6)]
    rows = []
    for session in range(16):
        prompt = common + [next(fresh) for _ in range(rng.randrange(4, 12))]
        for turn in range(rng.randrange(4, 10)):
            delay = {"delay": rng.randrange(200, 2000)} if turn else {}
            rows.append(request(prompt, rng, session_id=session, **delay))
            prompt = prompt + [next(fresh) for _ in range(rng.randrange(1, 4))]
    write("agent.jsonl", rows)


tools()
agent()
