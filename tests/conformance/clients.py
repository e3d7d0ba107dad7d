"""Drives a router with the official `openai` and `anthropic` clients, and compares with its engine.

Each scenario runs twice: at the engine, and through the router. The clients' objects must be equal.
Two taps, before and behind the router, show that bodies pass unchanged, and so do all headers but
those that the router documents.
"""

import argparse
import json
import re
import time
import urllib.request

import anthropic
import openai

from agents import SESSIONS
from tap import Tap

MODEL = "mock"
# Their hashes are in ../fixtures/conformance.toml.
KEY, SLOW_KEY = "conformance-key", "conformance-slow-key"
# Longer than any scenario needs; ends only those whose client has gone.
LONG = 4000
PATIENCE_SECS = 60
ASKED = [{"role": "user", "content": "What does a cache keep?"}]
PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}}
FUNCTION = {"name": "look_up", "description": "Looks a word up.", "parameters": PARAMETERS}


class Clients:
    def __init__(self, url, key=KEY, max_retries=0):
        options = {"api_key": key, "max_retries": max_retries, "timeout": PATIENCE_SECS}
        self.openai = openai.OpenAI(base_url=f"{url}/v1", **options)
        self.anthropic = anthropic.Anthropic(base_url=url, **options)


def dump(value):
    return value.model_dump(mode="json", warnings=False) if hasattr(value, "model_dump") else value


# Scenarios: what the clients' objects contain.


def chat(clients):
    create = clients.openai.chat.completions.create
    system = {"role": "system", "content": "Be brief."}
    earlier = [*ASKED, {"role": "assistant", "content": "Blocks."}, {"role": "user", "content": "Why?"}]
    yield create(model=MODEL, messages=ASKED, max_tokens=5)
    yield create(model=MODEL, messages=[system, *earlier], max_completion_tokens=3)
    parts = [{"type": "text", "text": "Ünïcödé, \"quoted\" 🎈"}]
    yield create(model=MODEL, messages=[{"role": "user", "content": parts}], max_tokens=2, extra_body={"top_k": 3})


def chat_stream(clients):
    create = clients.openai.chat.completions.create
    yield from create(model=MODEL, messages=ASKED, max_tokens=5, stream=True)
    options = {"include_usage": True}
    yield from create(model=MODEL, messages=ASKED, max_tokens=5, stream=True, stream_options=options)
    with clients.openai.chat.completions.stream(model=MODEL, messages=ASKED, max_tokens=3) as stream:
        yield from stream
        yield stream.current_completion_snapshot


def chat_tools(clients):
    create = clients.openai.chat.completions.create
    common = {"model": MODEL, "tools": [{"type": "function", "function": FUNCTION}], "max_tokens": 4}
    answer = create(messages=ASKED, tool_choice="required", **common)
    yield answer
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "look_up" and json.loads(call.function.arguments)["text"], answer
    result = {"role": "tool", "tool_call_id": call.id, "content": "A block."}
    yield create(messages=[*ASKED, answer.choices[0].message.model_dump(), result], **common)
    named = {"type": "function", "function": {"name": "look_up"}}
    yield from create(messages=ASKED, tool_choice=named, stream=True, **common)


def completions(clients):
    create = clients.openai.completions.create
    yield create(model=MODEL, prompt="What does", max_tokens=5)
    yield create(model=MODEL, prompt=[300, 301, 302], max_tokens=2)
    yield create(model=MODEL, prompt=["one", "two"], max_tokens=2)
    yield from create(model=MODEL, prompt="What does", max_tokens=5, stream=True)


def embeddings(clients):
    create = clients.openai.embeddings.create
    yield create(model=MODEL, input="What does a cache keep?")
    yield create(model=MODEL, input=["one", "two"], encoding_format="float")


def models(clients):
    yield [(model.id, model.object) for model in clients.openai.models.list()]


def responses(clients):
    client = clients.openai.responses
    first = client.create(model=MODEL, input="What does a cache keep?", max_output_tokens=4)
    assert first.output_text, first
    yield first
    yield client.retrieve(first.id)
    yield client.create(model=MODEL, input="Why?", previous_response_id=first.id, max_output_tokens=3)
    streamed = list(client.create(model=MODEL, input="And now?", max_output_tokens=4, stream=True))
    assert streamed[-1].type == "response.completed", streamed[-1]
    yield from streamed
    yield client.retrieve(streamed[-1].response.id)
    with client.stream(model=MODEL, input="And now?", max_output_tokens=2, instructions="Be brief.") as stream:
        yield from stream
        yield stream.get_final_response()


def responses_cancelled(clients):
    client = clients.openai.responses
    begun = client.create(model=MODEL, input="Count.", max_output_tokens=LONG, background=True)
    assert begun.status == "queued", begun
    yield begun
    yield client.cancel(begun.id)
    ended = client.retrieve(begun.id)
    assert ended.status == "cancelled", ended
    yield ended


def responses_tools(clients):
    client = clients.openai.responses
    common = {"model": MODEL, "tools": [{"type": "function", **FUNCTION}], "max_output_tokens": 4}
    answer = client.create(input=ASKED, tool_choice="required", **common)
    yield answer
    [call] = answer.output
    assert call.name == "look_up" and json.loads(call.arguments)["text"], answer
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "A block."}
    called = {key: value for key, value in call.model_dump().items() if value is not None}
    yield client.create(input=[*ASKED, called, result], **common)
    yield from client.create(input=ASKED, tool_choice="required", stream=True, **common)


def messages(clients):
    client = clients.anthropic.messages
    common = {"model": MODEL, "max_tokens": 4}
    yield client.create(messages=ASKED, **common)
    yield client.create(messages=ASKED, system="Be brief.", **common)
    blocks = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    yield client.create(messages=ASKED, system=blocks, **common)
    yield client.count_tokens(model=MODEL, messages=ASKED)
    yield from client.create(messages=ASKED, stream=True, **common)
    with client.stream(messages=ASKED, **common) as stream:
        yield from stream
        yield stream.get_final_message()


def messages_tools(clients):
    client = clients.anthropic.messages
    tool = {"name": "look_up", "description": "Looks a word up.", "input_schema": PARAMETERS}
    common = {"model": MODEL, "max_tokens": 4, "tools": [tool]}
    answer = client.create(messages=ASKED, tool_choice={"type": "any"}, **common)
    yield answer
    [call] = answer.content
    assert call.name == "look_up" and call.input["text"], answer
    used = {"type": "tool_use", "id": call.id, "name": call.name, "input": call.input}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "A block."}
    turns = [{"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
    yield client.create(messages=[*ASKED, *turns], **common)
    with client.stream(messages=ASKED, tool_choice={"type": "tool", "name": "look_up"}, **common) as stream:
        yield from stream
        yield stream.get_final_message()


def agents(clients):
    """Bodies of agent clients, as they are: their packages would build others of them."""
    for session in SESSIONS.values():
        for path, body in session():
            client = clients.anthropic if path == "/v1/messages" else clients.openai
            path = path if path == "/v1/messages" else path.removeprefix("/v1")
            yield client.post(path, body={"model": MODEL, **body}, cast_to=object)


def engine_errors(clients):
    """Errors that an engine makes, with their bodies."""
    create = clients.openai.chat.completions.create
    client = clients.openai.responses
    sent = client.create(model=MODEL, input="What?", max_output_tokens=1)
    too_long = [{"role": "user", "content": "word " * 60000}]
    yield failure(openai.BadRequestError, create, model=MODEL, messages=ASKED, n=2)
    yield failure(openai.BadRequestError, create, model=MODEL, messages=too_long, max_tokens=1)
    yield failure(openai.NotFoundError, client.retrieve, "resp_unknown")
    yield failure(openai.NotFoundError, client.create, model=MODEL, input="a", previous_response_id="resp_unknown")
    yield failure(openai.BadRequestError, client.cancel, sent.id)
    yield failure(openai.BadRequestError, clients.openai.embeddings.create, model=MODEL, input={})
    send = clients.anthropic.messages.create
    yield failure(anthropic.BadRequestError, send, model=MODEL, messages=too_long, max_tokens=1)


def failure(kind, call, *arguments, **fields):
    error = caught(kind, call, *arguments, **fields)
    return error.status_code, error.body


def caught(kind, call, *arguments, **fields):
    try:
        answer = call(*arguments, **fields)
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}: {answer}")


SCENARIOS = [
    chat, chat_stream, chat_tools, completions, embeddings, models, responses, responses_cancelled,
    responses_tools, messages, messages_tools, agents, engine_errors,
]


# Scenarios of the router alone.


def unknown_models(clients):
    """The router's own error in each API's form."""
    chat_error = caught(openai.NotFoundError, clients.openai.chat.completions.create, model="none", messages=ASKED)
    assert (chat_error.code, chat_error.param) == ("model_not_found", "model"), chat_error.body
    send = clients.anthropic.messages.create
    error = caught(anthropic.NotFoundError, send, model="none", messages=ASKED, max_tokens=1)
    assert error.body["type"] == "error" and error.body["error"]["type"] == "not_found_error", error.body
    # Engines have no route for one model.
    assert clients.openai.models.retrieve(MODEL).id == MODEL
    caught(openai.NotFoundError, clients.openai.models.retrieve, "none")
    caught(openai.NotFoundError, clients.openai.embeddings.create, model="none", input="a")
    caught(openai.NotFoundError, clients.openai.files.list)


def bad_requests(clients):
    create = clients.openai.chat.completions.create
    caught(openai.BadRequestError, create, model=MODEL, messages="no list")
    caught(openai.BadRequestError, clients.openai.completions.create, model=MODEL, prompt={})
    send = clients.anthropic.messages.create
    caught(anthropic.BadRequestError, send, model=MODEL, messages="no list", max_tokens=1)


def unauthorized(url):
    clients = Clients(url, key="of-nobody")
    for call in ASK_EACH:
        error = caught((openai.AuthenticationError, anthropic.AuthenticationError), call, clients)
        assert error.response.headers["www-authenticate"] == "Bearer", error.response.headers


def limited(url):
    """The clients wait as long as `Retry-After` says, and succeed."""
    for call in ASK_EACH:
        clients = Clients(url, key=SLOW_KEY)
        error, deadline = None, time.monotonic() + PATIENCE_SECS
        while error is None:
            assert time.monotonic() < deadline, "no limit"
            try:
                call(clients)
            except (openai.RateLimitError, anthropic.RateLimitError) as limit:
                error = limit
        assert int(error.response.headers["retry-after"]) >= 1, error.response.headers
        call(Clients(url, key=SLOW_KEY, max_retries=5))


def unavailable(clients):
    for call in ASK_EACH:
        error = caught((openai.InternalServerError, anthropic.InternalServerError), call, clients)
        assert error.status_code == 503, error
        assert int(error.response.headers["retry-after"]) >= 1, error.response.headers


ASK_EACH = [
    lambda clients: clients.openai.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=1),
    lambda clients: clients.openai.responses.create(model=MODEL, input="a", max_output_tokens=1),
    lambda clients: clients.anthropic.messages.create(model=MODEL, messages=ASKED, max_tokens=1),
]

STREAM_EACH = [
    lambda clients: clients.openai.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=LONG, stream=True),
    lambda clients: clients.openai.completions.create(model=MODEL, prompt="a", max_tokens=LONG, stream=True),
    lambda clients: clients.openai.responses.create(model=MODEL, input="a", max_output_tokens=LONG, stream=True),
    lambda clients: clients.anthropic.messages.create(model=MODEL, messages=ASKED, max_tokens=LONG, stream=True),
]


def aborted(clients, engine, admin):
    """A client that closes a stream in the middle ends its request everywhere."""
    for number, stream in enumerate(STREAM_EACH, counter(engine, "aborted") + 1):
        with stream(clients) as events:
            for _ in range(8):
                next(events)
        wait_until("the engine aborts it", lambda: counter(engine, "aborted") == number)
    wait_until("no slot is left", lambda: slots(admin) == 0)


def counter(engine, name):
    return sum(rank[name] for rank in fetch(f"{engine}/debug/counters")["ranks"])


def slots(admin):
    return sum(source["active_requests"] for source in fetch(f"{admin}/v1/slots")["sources"])


# Comparison.


def normal(values):
    """JSON without times, and with the ids in the order of their appearance."""
    text = json.dumps(values, sort_keys=True, ensure_ascii=False)
    text = re.sub(r'"(created|created_at)": [0-9.]+', r'"\1": 0', text)
    names = {}
    name = lambda match: names.setdefault(match[0], f"{match[1]}-{len(names)}")
    return re.sub(r"(chatcmpl|cmpl|resp|msg)[-_][0-9a-f]{8}\b", name, text)


def compare_objects(scenario, direct, routed, engine):
    results = []
    for clients in direct, routed:
        # Both find the cache empty.
        wait_until("the cache is reset", lambda: fetch(f"{engine}/reset_prefix_cache", b"")["success"])
        results.append([normal(dump(value)) for value in scenario(clients)])
    direct_result, routed_result = results
    for at, (left, right) in enumerate(zip(direct_result, routed_result, strict=True)):
        assert left == right, f"{scenario.__name__}, value {at}:\ndirect {left}\nrouted {right}"


# What the router documents to change, in docs/CLIENTS.md, "Bodies and headers".
NOT_TO_ENGINE = {"host", "content-length", "accept-encoding", "authorization", "x-api-key"}
ADDED_TO_REQUEST = {"x-request-id", "x-data-parallel-rank"}
ADDED_TO_ANSWER = ("x-request-id", "x-warmroute-", "x-ratelimit-")
ANSWERED_BY_ROUTER = re.compile(r"/v1/models\b")


def compare_bytes(before, behind):
    """Returns the number of requests of which both sides are known and equal."""
    sent = {exchange.request_headers.get("x-request-id"): exchange for exchange in behind.exchanges}
    compared = 0
    for exchange in before.exchanges:
        request_id = exchange.answer_headers.get("x-request-id")
        assert request_id, f"{exchange.path}: no id"
        engines = sent.get(request_id)
        if engines is None:
            refused = exchange.status is not None and exchange.status >= 400
            assert refused or ANSWERED_BY_ROUTER.match(exchange.path), exchange.path
            continue
        compare_exchange(exchange, engines)
        compared += 1
    return compared


def compare_exchange(clients, engines):
    equal("method", clients.method, engines.method)
    equal("path", clients.path, engines.path)
    equal("status", clients.status, engines.status)
    equal("request body", clients.request_body, engines.request_body)
    if clients.is_whole:
        equal("answer body", clients.answer_body, engines.answer_body)
    else:
        assert engines.answer_body.startswith(clients.answer_body), clients.path
    requested = without(clients.request_headers, NOT_TO_ENGINE | ADDED_TO_REQUEST)
    equal("request headers", requested, without(engines.request_headers, NOT_TO_ENGINE | ADDED_TO_REQUEST))
    for name in "authorization", "x-api-key", "accept-encoding":
        assert name not in engines.request_headers, f"{name} reaches the engine"
    added = {name for name in clients.answer_headers if name.startswith(ADDED_TO_ANSWER)}
    equal("answer headers", without(clients.answer_headers, added), engines.answer_headers)


def without(headers, names):
    return {name: value for name, value in headers.items() if name not in names}


def equal(what, left, right):
    assert left == right, f"{what}:\nclient's side {left}\nengine's side {right}"


# The fleet.


def fetch(url, body=None, method=None):
    headers = {"x-warmroute-admin": "1", "content-type": "application/json"}
    request = urllib.request.Request(url, body, headers, method=method)
    with urllib.request.urlopen(request, timeout=PATIENCE_SECS) as answer:
        return json.load(answer)


def wait_until(what, condition):
    deadline = time.monotonic() + PATIENCE_SECS
    while not condition():
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.005)


def is_healthy(admin):
    return any(worker["health"] == "healthy" for worker in fetch(f"{admin}/workers")["workers"])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--router", required=True, help="URL of its public port")
    parser.add_argument("--admin", required=True, help="URL of its admin port")
    parser.add_argument("--worker", required=True, type=json.loads, help="the engine as a worker, in JSON")
    arguments = parser.parse_args()
    engine = arguments.worker["url"]
    behind, before = Tap(engine), Tap(arguments.router)
    added = json.dumps({**arguments.worker, "url": behind.url}).encode()
    worker = fetch(f"{arguments.admin}/workers", added)["worker"]
    wait_until("the worker serves", lambda: is_healthy(arguments.admin))
    direct, routed = Clients(engine), Clients(before.url)
    for scenario in SCENARIOS:
        compare_objects(scenario, direct, routed, engine)
        print(f"{scenario.__name__}: equal", flush=True)
    aborted(routed, engine, arguments.admin)
    unknown_models(routed)
    bad_requests(routed)
    unauthorized(before.url)
    limited(before.url)
    fetch(f"{arguments.admin}/workers/{worker}", method="DELETE")
    unavailable(routed)
    compared = compare_bytes(before, behind)
    assert compared > 50, compared
    print(f"{compared} requests and answers pass unchanged")


if __name__ == "__main__":
    main()
