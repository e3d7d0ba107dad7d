"""Two real vLLM servers, and plain HTTP to whatever is tested.

Deadlines here are for things that hang; nothing is judged by how long it took.
"""

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

BLOCK_TOKENS = 32
BLOCKS = {"full": 65, "images": 65, "sliding": 193, "all-sliding": 36}
"""By the model's form; vLLM keeps one for itself, and one for each of three groups holds the same tokens."""
CONTEXT_TOKENS = {"full": 2016}
"""What fits into its blocks, for sessions of agents; 1,024 of other forms."""
OFFLOAD_BYTES = 96 * 16384
"""96 blocks of two layers with two heads of 32."""
RANKS_MAX = 2
BUFFER_STEPS = 200
"""Batches that a replay reaches back."""
MODEL, OTHER_MODEL = "tiny", "other"
DEADLINE_SECS = 1800
HOST = "127.0.0.1"


class Failed(Exception):
    """A check did not hold."""


def check(holds, what):
    if not holds:
        raise Failed(what)


def phase(title):
    print(f"\n== {title} ==", flush=True)


def listed(counts):
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def wait_for(what, condition):
    """Polls until `condition` gives something true, which is returned."""
    end = time.monotonic() + DEADLINE_SECS
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > end:
            raise Failed(f"waited {DEADLINE_SECS} s in vain: {what}")
        time.sleep(0.05)


def call(port, method, path, body=None, headers=None):
    """One exchange on a connection of its own: status, headers (lower case), body."""
    connection = http.client.HTTPConnection(HOST, port, timeout=DEADLINE_SECS)
    try:
        data = None if body is None else json.dumps(body)
        # The second is for changes on a router's admin port.
        sent = {"content-type": "application/json", "x-warmroute-admin": "1", **(headers or {})}
        connection.request(method, path, data, sent)
        response = connection.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return response.status, headers, response.read()
    finally:
        connection.close()


def get(port, path):
    status, _, body = call(port, "GET", path)
    if status != 200:
        raise Failed(f"GET {path}: {status} {body[:300]}")
    return json.loads(body)


def cached_tokens(usage):
    """As chats and completions, responses, or messages report them; vLLM leaves them out if there are none."""
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return details.get("cached_tokens") or usage.get("cache_read_input_tokens") or 0


def metric(port, name, label=""):
    """The sum of a metric's series whose labels have `label`."""
    text = call(port, "GET", "/metrics")[2].decode()
    lines = [line for line in text.splitlines() if line.startswith(name) and label in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for held in sockets:
        held.bind(("", 0))
    ports = [held.getsockname()[1] for held in sockets]
    for held in sockets:
        held.close()
    return ports


def ports_apart(count):
    """Free ports with a free one behind each."""
    while True:
        ports = free_ports(count)
        if len({port + rank for port in ports for rank in range(RANKS_MAX)}) == count * RANKS_MAX:
            return ports


def parents():
    """The parent of every process of this machine."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        # The name may have blanks and parentheses: the fields after it count from its end.
        found[int(stat.parent.name)] = int(text.rpartition(")")[2].split()[1])
    return found


def descendants(pid):
    of = parents()
    family = [pid]
    for member in family:
        family.extend(child for child, parent in of.items() if parent == member)
    return family[1:]


def exists(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


class Engine:
    """A vLLM server on ports that stay its own over restarts."""

    def __init__(self, name, options):
        self.name = name
        # Each rank's sockets have the next ports.
        self.port, self.kv_port, self.replay_port = ports_apart(3)
        self.options = options
        self.ranks, self.assume = 1, ()
        self.model, self.served = options.model, MODEL
        self.blocks = BLOCKS[options.form]
        self.context = CONTEXT_TOKENS.get(options.form, 1024)
        self.flags, self.python_path, self.environment = [], [], {}
        self.buffer_steps = BUFFER_STEPS
        self.cpus = os.sched_getaffinity(0)
        self.process = None
        self.lives = 0

    def offload(self):
        """Serves the other model, in few blocks, and offloads them to the CPU."""
        self.model, self.served, self.blocks = self.options.other_model, OTHER_MODEL, 33
        self.context = 1024
        connector = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "CopyingSpec",
                "spec_module_path": "cpu_offload",
                "cpu_bytes_to_use": OFFLOAD_BYTES,
                "self_describing_kv_events": True,
            },
        }
        self.flags = ["--kv-transfer-config", json.dumps(connector)]
        self.python_path = [str(Path(__file__).parent)]

    def start(self):
        self.lives += 1
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            # An endpoint without `*` would connect instead of binding.
            "endpoint": f"tcp://*:{self.kv_port}",
            "replay_endpoint": f"tcp://{HOST}:{self.replay_port}",
            "buffer_steps": self.buffer_steps,
        }
        command = [
            *(self.options.python, "-m", "vllm.entrypoints.openai.api_server"),
            *("--host", HOST, "--port", str(self.port)),
            *("--model", self.model, "--served-model-name", self.served),
            *("--load-format", "dummy", "--dtype", "bfloat16", "--enforce-eager"),
            *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(self.blocks)),
            # One step computes any prompt: without full attention only its first part is placed otherwise.
            *("--max-model-len", str(self.context), "--max-num-seqs", "8", "--max-num-batched-tokens", "8192"),
            *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
            # For the render routes, and for /v1/messages with tools.
            *("--enable-scale-out", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
            *("--kv-events-config", json.dumps(events)),
            *self.flags,
        ]
        inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        environment = {
            **os.environ,
            **self.environment,
            "PYTHONPATH": os.pathsep.join(filter(None, [*self.python_path, *inherited])),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_HOST_IP": HOST,
            # For /reset_prefix_cache.
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
        log = self.options.logs / f"{self.name}.{self.lives}.log"
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
            )
        # Its children and threads inherit them.
        os.sched_setaffinity(self.process.pid, self.cpus)

    def is_healthy(self):
        if self.process.poll() is not None:
            raise Failed(f"{self.name} ended by itself: see its log in {self.options.logs}")
        try:
            return call(self.port, "GET", "/health")[0] == 200
        except OSError:
            return False

    def kill(self):
        """SIGKILL for the server and its children: as when the machine loses power."""
        family = [self.process.pid, *descendants(self.process.pid)]
        for pid in family:
            send(pid, signal.SIGKILL)
        self.process.wait()
        wait_for(f"{self.name} is gone", lambda: not any(exists(pid) for pid in family))

    def stop(self):
        if self.process is None or self.process.poll() is not None:
            return
        children = descendants(self.process.pid)
        self.process.terminate()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pid in children:
            if exists(pid):
                send(pid, signal.SIGKILL)

    def metric(self, name, label=""):
        return metric(self.port, name, label)


def send(pid, what):
    try:
        os.kill(pid, what)
    except ProcessLookupError:
        pass
