"""Further checks, each on a checker: other routes, images, overload, a router that starts late, a second model."""

import base64
import random
import struct
import sys
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fleet import (
    BLOCK_TOKENS,
    BUFFER_STEPS,
    OTHER_MODEL,
    Engine,
    cached_tokens,
    check,
    listed,
    phase,
    wait_for,
)
from plane import Embedded

sys.path.append(str(Path(__file__).resolve().parent.parent / "conformance"))
from agents import SESSIONS, TURNS  # noqa: E402

CLIENTS = 14
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "get_weather", "description": "The weather of a city."}
CALL = {"name": "get_weather", "arguments": '{"city": "Köln"}'}


def other_routes(checker):
    phase("/v1/responses and /v1/messages, with tools")
    before = checker.hits
    for number in range(2):
        turns = [checker.words(30) for _ in range(6)]
        instructions = checker.words(60)
        responses(checker, instructions, turns, f"call0000{number}")
        messages(checker, instructions, turns, f"call0000{number}")
    checker.report()
    check(checker.hits - before >= 12, "too few hits to mean anything")


def agents(checker):
    phase("agent clients, ten turns each")
    for name, session in SESSIONS.items():
        before = checker.hits
        for path, body in session():
            checker.compare(path, body)
        print(f"{name}: {checker.hits - before} of {TURNS} turns had cached tokens", flush=True)
        check(checker.hits - before >= TURNS - 1, f"{name}: turns without cached tokens")


def responses(checker, instructions, turns, call_id):
    tools = [{"type": "function", **TOOL, "parameters": SCHEMA}]
    history = []

    def respond(*items):
        history.extend(items)
        body = {"instructions": instructions, "input": history, "tools": tools, "max_output_tokens": 4}
        checker.compare("/v1/responses", body)

    def said(text):
        return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}

    respond({"role": "user", "content": turns[0]})
    respond(said(turns[1]), {"role": "user", "content": [{"type": "input_text", "text": turns[2]}]})
    call = {"type": "function_call", "call_id": call_id, **CALL}
    respond(call, {"type": "function_call_output", "call_id": call_id, "output": turns[3]})
    respond(said(turns[4]), {"role": "user", "content": turns[5]})
    respond()


def messages(checker, instructions, turns, call_id):
    tools = [{**TOOL, "input_schema": SCHEMA}]
    system = [{"type": "text", "text": instructions}]
    history = []

    def send(*items):
        history.extend(items)
        body = {"system": system, "messages": history, "tools": tools, "max_tokens": 4}
        checker.compare("/v1/messages", body)

    send({"role": "user", "content": turns[0]})
    send(
        {"role": "assistant", "content": [{"type": "text", "text": turns[1]}]},
        {"role": "user", "content": turns[2]},
    )
    use = {"type": "tool_use", "id": call_id, "name": CALL["name"], "input": {"city": "Köln"}}
    result = {"type": "tool_result", "tool_use_id": call_id, "content": turns[3]}
    send({"role": "assistant", "content": [use]}, {"role": "user", "content": [result]})
    send({"role": "assistant", "content": turns[4]}, {"role": "user", "content": turns[5]})
    send()


def overload(checker):
    phase(f"overload: {CLIENTS} clients with sessions that do not fit")
    done = threading.Event()
    routers = checker.router.routers()

    def client(number):
        own = random.Random(number)
        prompt, sent = [], 0
        while not done.is_set():
            if len(prompt) > 800:
                prompt = []
            prompt = prompt + [own.randrange(300, 1000) for _ in range(own.randrange(20, 120))]
            checker.complete(routers[sent % len(routers)].port, prompt)
            sent += 1
        return sent

    def total(name, label=""):
        return sum(router.metric(name, label) for router in routers)

    def doubted():
        # Only sources with full attention alone are asked about again.
        wanted = ("audit_rechecks_total", 12) if checker.form == "full" else ("overlap_short_requests_total", 30)
        return total(wanted[0]) >= wanted[1] or any(client.done() for client in clients)

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client, number) for number in range(CLIENTS)]
        try:
            wait_for("requests that lacked credited blocks", doubted)
        finally:
            done.set()
    sent = sum(client.result() for client in clients)
    rechecks = {
        result: round(total("audit_rechecks_total", f'result="{result}"'))
        for result in ("cleared", "unproven", "strike")
    }
    short = total("overlap_short_requests_total")
    print(f"{sent} requests, {short:.0f} found less than credited; rechecks: {listed(rechecks)}")
    check(total("source_demotions_total") == 0, "a correct engine was demoted")
    before, hits = checker.compared, checker.hits
    for _ in range(8):
        prompt = checker.ids(200)
        checker.completion(prompt)
        checker.completion(prompt + checker.ids(40))
    for router in routers:
        for worker in router.admin("/workers")["workers"]:
            check(not worker["demoted_ranks"], f"{worker['entry']['worker']} is demoted")
    check(checker.compared - before >= 12 and checker.hits - hits >= 6, "no credit after the overload")
    checker.report()


def late_start(checker, given):
    """Both engines hold prefixes whose stores are older than their replays."""
    phase("a router that starts late")
    hot = [checker.ids(5 * BLOCK_TOKENS + 7) for _ in range(2)]
    fillers = [checker.ids(BLOCK_TOKENS + 1) for _ in range(BUFFER_STEPS + 20)]

    def heat(engine):
        for number, filler in enumerate(fillers):
            if number % 5 == 0:
                checker.directly(engine, hot[number // 5 % len(hot)])
            checker.directly(engine, filler)

    def cool(engine):
        for _ in range(8):
            checker.directly(engine, checker.ids(900))

    with ThreadPoolExecutor() as pool:
        list(pool.map(heat, checker.engines))
    late = Embedded(checker.engines, given, "router-late")
    try:
        learn(checker, late, hot)
        for engine in checker.engines:
            cool(engine)
        unlearn(checker, late, hot)
    finally:
        late.stop()
    checker.report()


def ask(checker, late, prompt):
    """A request to the late router: worker, state, credited and cached tokens."""
    headers, usage = checker.complete(late.port, prompt)
    credit = int(headers["x-warmroute-overlap-blocks"]) * BLOCK_TOKENS
    return headers["x-warmroute-worker"], headers["x-warmroute-index-state"], credit, cached_tokens(usage)


def learn(checker, late, hot):
    def partial():
        states = [source["state"] for source in late.sources().values()]
        return len(states) == len(checker.engines) and set(states) == {"partial"}

    wait_for("the late router has what the replays have", partial)
    for prompt in hot:
        asked = []

        def learned():
            asked.append(ask(checker, late, prompt))
            _, state, credit, cached = asked[-1]
            check(credit <= cached, f"credit for what is not held: {asked}")
            return state == "unverified" and credit == cached > 0

        wait_for("the report gives credit", learned)
        for worker, state, credit, cached in asked:
            print(f"{worker}: {state}, credited {credit}, cached {cached}")


def unlearn(checker, late, hot):
    """Nothing of it is held any more: the first smaller report of each engine ends the credit."""
    over = 0
    for prompt in hot:
        for _ in range(4):
            worker, state, credit, cached = ask(checker, late, prompt)
            print(f"{worker}: {state}, credited {credit}, cached {cached}")
            over += credit > cached
    check(0 < over <= len(hot) * len(checker.engines), f"{over} requests found less than learned")


def picture(color):
    """A PNG of one color, as vLLM reads it in a chat."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    width, height = 80, 70
    rows = (b"\0" + bytes(color) * width) * height
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    image = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return base64.b64encode(image).decode()


def images(checker):
    phase("prompts with images are credited as the engine caches them")
    red, blue, green = ((200, 0, 0), (0, 0, 200), (0, 200, 0))
    system, text = checker.words(60), checker.words(70)

    def parts(pictures, question, named=False):
        urls = [{"url": f"data:image/png;base64,{picture(color)}"} for color in pictures]
        shown = [{"type": "image_url", "image_url": url} for url in urls]
        if named:
            shown = [{**part, "uuid": str(color)} for part, color in zip(shown, pictures)]
        return [{"type": "text", "text": "Look:"}, *shown, {"type": "text", "text": question}]

    def ask(pictures, question=text, named=False, **more):
        content = parts(pictures, question, named)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": content}]
        body = {"messages": messages, "max_tokens": 2, "ignore_eos": True, **more}
        return cached_tokens(checker.compare("/v1/chat/completions", body)["usage"])

    before = ask([red])
    check(before == 0 and ask([red]) > 3 * BLOCK_TOKENS, "the image's blocks are not found again")
    check(ask([blue]) < ask([red]), "the other image has other blocks")
    order = [red, blue, green]
    ask(order)
    whole = ask(order)
    check(ask([blue, red, green]) < whole, "images that change places have other blocks")
    check(ask(order, cache_salt="tenant") == 0, "a salt has its own blocks")
    ask(order, cache_salt="tenant")
    ask(order, named=True)
    ask(order, named=True)
    for _ in range(60):
        pictures = checker.random.choices([*order, (9, 9, 9)], k=checker.random.randint(1, 4))
        question = text[: checker.random.choice([40, 200, 400])]
        ask(pictures, question, named=checker.random.random() < 0.3)
    anthropic = [{"type": "base64", "media_type": "image/png", "data": picture(color)} for color in order]
    content = [{"type": "image", "source": source} for source in anthropic]
    body = {"max_tokens": 2, "system": system, "messages": [{"role": "user", "content": content}]}
    urls = [f"data:image/png;base64,{picture(color)}" for color in order]
    shown = [{"type": "input_image", "detail": "auto", "image_url": url} for url in urls]
    listed_parts = [{"type": "input_text", "text": text}, *shown]
    other = {"max_output_tokens": 2, "instructions": system, "input": [{"role": "user", "content": listed_parts}]}
    for _ in range(2):
        checker.compare("/v1/messages", body)
        checker.compare("/v1/responses", other)
    for router in checker.router.routers():
        rendered = router.metric("decision_step_seconds_count", 'step="render"')
        seconds = router.metric("decision_step_seconds_sum", 'step="render"')
        print(f"{rendered:.0f} prompts rendered, {1000 * seconds / max(rendered, 1):.1f} ms each")
        check(router.metric("unhashed_requests_total") == 0, "a prompt was not rendered")
    checker.report()


def other_model(checker, given):
    phase("a second model with a tokenizer of its own, and CPU offloading")
    engine = Engine("engine-c", given)
    engine.offload()
    checker.add(engine)
    for _ in range(4):
        system = {"role": "system", "content": checker.words(120)}
        for _ in range(2):
            chat = [system, {"role": "user", "content": checker.words(12)}]
            checker.chat(chat)
            checker.chat(chat, model=OTHER_MODEL)
    stems = [checker.ids(checker.random.randrange(100, 400)) for _ in range(12)]
    for _ in range(3):
        for stem in stems:
            checker.completion(stem, model=OTHER_MODEL)
    checker.completion(stems[0] + checker.ids(70), model=OTHER_MODEL)
    loaded = engine.metric("vllm:external_prefix_cache_hits_total")
    print(f"{loaded:.0f} tokens loaded from CPU memory")
    check(loaded > 0, "nothing was loaded")
    checker.report()
