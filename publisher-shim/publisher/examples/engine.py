"""An engine of one's own: it caches whole blocks of prompts of token ids, and publishes which ones.
Usage: engine.py HTTP_PORT EVENTS_PORT REPLAY_PORT"""

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

from warmroute import Publisher

BLOCK, CAPACITY = 16, 64
http_port, events_port, replay_port = map(int, sys.argv[1:])
publisher = Publisher(
    f"tcp://127.0.0.1:{events_port}", f"tcp://127.0.0.1:{replay_port}", block_size=BLOCK
)
held = {}  # hashes of blocks, the oldest first


def compute(tokens):
    """Caches a prompt. Returns how many of its tokens were cached before."""
    hit, parent = 0, None
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        block = hash(tuple(tokens[:end]))
        if block not in held:
            if len(held) == CAPACITY:
                oldest = next(iter(held))
                del held[oldest]
                publisher.removed([oldest])
            held[block] = None
            publisher.stored([block], tokens[end - BLOCK : end], parent)
        elif hit == end - BLOCK and end < len(tokens):
            hit = end
        parent = block
    return hit


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        models = {"object": "list", "data": [{"id": "own", "object": "model"}]}
        self.answer({"/health": {}, "/v1/models": models}.get(self.path))

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path == "/reset":
            held.clear()
            publisher.cleared()
            return self.answer({})
        if self.path != "/v1/completions":
            return self.answer(None)
        tokens = json.loads(body)["prompt"]
        usage = {"prompt_tokens": len(tokens), "completion_tokens": 1, "total_tokens": len(tokens) + 1,
                 "prompt_tokens_details": {"cached_tokens": compute(tokens)}}
        choice = {"index": 0, "text": "!", "finish_reason": "length"}
        self.answer({"object": "text_completion", "model": "own", "choices": [choice], "usage": usage})

    def answer(self, body):
        text = json.dumps(body).encode()
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


server = HTTPServer(("127.0.0.1", http_port), Handler)
print(json.dumps({"port": http_port}), flush=True)
server.serve_forever()
