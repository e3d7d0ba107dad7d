"""Real chat templates and seeded random chats: the router's own rendering beside vLLM's, without a GPU.

Each answer of the router is equal to vLLM's token ids, or refused for a reason that it names, or different. Ends with
an error if one is different. A body that both refuse is counted apart, as is one that only vLLM refuses: it has no
prompt.
"""

import argparse
import collections
import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from fleet import HOST, Failed, free_ports, listed, phase, wait_for
from random_chats import ROUTES, Chats
from tokenizers import Tokenizer

PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
SHOWN = 3
"""Different answers of one template that are printed."""
AROUND = 120
"""Characters of a text that are printed on each side of its first difference."""
CONTEXT_TOKENS = 1 << 20
VERDICTS = ("equal", "refused", "both refuse", "only vLLM refuses", "different")
TEMPLATE_FAILED = "the template failed"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="directory of a tokenizer")
    parser.add_argument("--templates", type=Path, required=True, help="directory of *.jinja files")
    parser.add_argument("--render", type=Path, required=True, help="the example `render` of warmroute-chat")
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--chats", type=int, default=60, help="random chats for each template")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="a part of the names of the templates that are tried")
    parser.add_argument("--differences", type=Path, help="a file for the bodies with different answers")
    return parser.parse_args()


def with_long_context(model, out):
    """A copy of the model that takes any prompt, and has the special token with which most templates begin."""
    shutil.copytree(model, out)
    for name, changed in (
        ("config.json", {"max_position_embeddings": CONTEXT_TOKENS}),
        ("tokenizer_config.json", {"model_max_length": CONTEXT_TOKENS, "bos_token": "<|endoftext|>"}),
    ):
        file = out / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changed))


class Engine:
    """vLLM's render-only server, on one connection."""

    def __init__(self, model, log):
        self.port = free_ports(1)[0]
        here = Path(__file__).parent
        command = [sys.executable, here / "render_server.py", "--model", model, "--served-model-name", "m"]
        command += ["--host", HOST, "--port", str(self.port), "--uvicorn-log-level", "warning"]
        command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        self.process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
        self.connection = http.client.HTTPConnection(HOST, self.port, timeout=600)

    def is_up(self):
        if self.process.poll() is not None:
            raise Failed("vLLM's render server ended, see its log")
        try:
            self.post("/template", b"")
        except OSError:
            self.connection.close()
            return False
        return True

    def post(self, path, body):
        self.connection.request("POST", path, body, {"content-type": "application/json"})
        response = self.connection.getresponse()
        return response.status, response.read()

    def use(self, template):
        status, answer = self.post("/template", template.encode())
        if status != 200:
            raise Failed(f"POST /template: {status} {answer[:300]}")

    def render(self, route, body):
        """Token ids, or the text of a refusal."""
        status, answer = self.post(PATHS[route] + "/render", body.encode())
        answer = json.loads(answer)
        return answer["token_ids"] if status == 200 else f"{status} {answer['error']['message']}"

    def stop(self):
        self.process.terminate()
        self.process.wait()


class Router:
    """The router's reader of requests, as a program that answers line by line."""

    def __init__(self, program, model):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([program, model], text=True, **pipes)

    def render(self, template, route, body):
        """Token ids, or the reason of a refusal."""
        json.dump({"template": str(template), "route": route, "body": body}, self.process.stdin)
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        return answer.get("token_ids", answer.get("refused"))

    def stop(self):
        self.process.stdin.close()
        self.process.wait()


def judge(vllm, router):
    if isinstance(vllm, str):
        return "both refuse" if isinstance(router, str) else "only vLLM refuses"
    if isinstance(router, str):
        return "refused"
    return "equal" if vllm == router else "different"


class Seen:
    """Answers so far."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.verdicts = collections.defaultdict(collections.Counter)
        self.reasons = collections.Counter()
        self.different = []

    def add(self, case, vllm, router):
        verdict = judge(vllm, router)
        counts = self.verdicts[case["template"]]
        counts[verdict] += 1
        if verdict == "refused":
            self.reasons[f"{router} [{case['template']}]" if TEMPLATE_FAILED in router else router] += 1
        if verdict == "different":
            texts = [self.tokenizer.decode(ids, skip_special_tokens=False) for ids in (vllm, router)]
            self.different.append({**case, "vllm": texts[0], "router": texts[1]})
            if counts[verdict] <= SHOWN:
                at = len(os.path.commonprefix(texts))
                shown = [repr(text[max(0, at - AROUND) : at + AROUND]) for text in texts]
                print(f"  {case['route']} {case['number']}: vLLM, then the router", *shown, sep="\n    ")


def main():
    args = arguments()
    args.logs.mkdir(parents=True, exist_ok=True)
    templates = sorted(args.templates.glob("*.jinja"))
    templates = [path for path in templates if args.only in path.name]
    if not templates:
        raise Failed(f"no templates in {args.templates}")
    seen = Seen(Tokenizer.from_file(str(args.model / "tokenizer.json")))
    with open(args.logs / "render-server.log", "w") as log, tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        with_long_context(args.model, model)
        engine, router = Engine(model, log), Router(args.render, model)
        try:
            wait_for("vLLM's render server", engine.is_up)
            phase(f"{len(templates)} templates, {args.chats} random chats each, seed {args.seed}")
            for path in templates:
                engine.use(path.read_text())
                for number in range(args.chats):
                    route = ROUTES[number % len(ROUTES)]
                    chat = Chats(f"{args.seed} {path.name} {number}").body(route)
                    body = json.dumps(chat, ensure_ascii=False)
                    case = {"template": path.name, "number": number, "route": route, "body": chat}
                    seen.add(case, engine.render(route, body), router.render(path, route, body))
                print(f"{path.stem}: {listed(seen.verdicts[path.name])}", flush=True)
        finally:
            router.stop()
            engine.stop()
    if args.differences:
        lines = [json.dumps(case, ensure_ascii=False) + "\n" for case in seen.different]
        args.differences.write_text("".join(lines))
    phase("reasons of refusals")
    for reason, count in seen.reasons.most_common():
        print(f"{count:6} {reason}")
    total = sum(seen.verdicts.values(), collections.Counter())
    phase(listed({name: total[name] for name in VERDICTS}))
    if seen.different:
        raise Failed(f"{len(seen.different)} answers of the router are different")


if __name__ == "__main__":
    try:
        main()
    except Failed as failure:
        sys.exit(f"FAILED: {failure}")
