"""Warmroute in front of the engines: in one process, or every part of its own over a nats-server. The checks see
one thing with one set of questions."""

import json
import os
import shutil
import signal
import socket
import subprocess

from fleet import HOST, OTHER_MODEL, Failed, call, free_ports, get, metric, send, wait_for

FEED_COUNTS = ("batches", "gaps", "gaps_unfilled", "restarts", "payloads_malformed", "orphans")


SETTINGS = """\
multimodal = "render"

[admin]
explain_headers = "all"

[models."{model}"]
tokenizer = "{tokenizer}"
"""


class Part:
    """A process that tells its ports first, and can be killed and started again."""

    def __init__(self, name, command, options):
        self.name, self.command, self.options = name, command, options
        self.process = None
        self.start()

    def start(self):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("WARMROUTE_")}
        mode = "ab" if self.process else "wb"
        with (self.options.logs / f"{self.name}.log").open(mode) as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
            )
        line = self.process.stdout.readline()
        if not line:
            raise Failed(f"{self.name} did not start: see its log in {self.options.logs}")
        self.said = json.loads(line)
        self.port = self.said["port"]

    def kill(self):
        send(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def is_ready(self):
        try:
            return call(self.port, "GET", "/readyz")[0] == 200
        except OSError:
            return False


class Router(Part):
    def __init__(self, name, arguments, options, more_settings=""):
        settings = options.logs / "router.toml"
        settings.write_text(more_settings + SETTINGS.format(model=OTHER_MODEL, tokenizer=options.other_model))
        command = [options.router, "--host", HOST, "--port", "0", "--admin-port", "0", "--config", str(settings)]
        super().__init__(name, [*command, "--tokenizer", options.model, *arguments], options)
        self.admin_port = self.said["admin_port"]

    def admin(self, path):
        return get(self.admin_port, path)

    def metric(self, name, label=""):
        return metric(self.admin_port, f"warmroute_router_{name}", label)

    def active(self):
        return [
            source
            for source in self.admin("/v1/slots")["sources"]
            if source["active_requests"] or source["prefill_tokens"] or source["decode_blocks"]
        ]


def digests(port):
    return {name_of(source): source for source in get(port, "/v1/digest")["sources"]}


def name_of(source):
    rank = source["dp_rank"]
    return f"{source['worker']}/{rank}" if rank else source["worker"]


def is_listening(port):
    try:
        socket.create_connection((HOST, port)).close()
    except OSError:
        return False
    return True


def declared(engine):
    """A worker as a flag: the admin port takes no assumptions."""
    sockets = (f"{key}=tcp://{HOST}:{port}" for key, port in (("kv", engine.kv_port), ("replay", engine.replay_port)))
    assumed = (f"assume={what}" for what in engine.assume)
    url = f"http://{HOST}:{engine.port}"
    return ",".join([url, *sockets, f"id={engine.name}", f"ranks={engine.ranks}", *assumed])


class Embedded:
    """One router with everything inside."""

    def __init__(self, engines, options, name="router", arguments=(), more_settings=""):
        flags = [f"--worker={declared(engine)}" for engine in engines if engine.assume]
        self.router = Router(name, [*flags, *arguments], options, more_settings)
        try:
            for engine in engines:
                if not engine.assume:
                    self.add(engine)
        except BaseException:
            self.stop()
            raise

    def add(self, engine):
        worker = {
            "id": engine.name,
            "url": f"http://{HOST}:{engine.port}",
            "kv": f"tcp://{HOST}:{engine.kv_port}",
            "replay": f"tcp://{HOST}:{engine.replay_port}",
            "ranks": engine.ranks,
        }
        status, _, raw = call(self.router.admin_port, "POST", "/workers", worker)
        if status != 201:
            raise Failed(f"POST /workers: {status} {raw[:300]!r}")

    @property
    def port(self):
        return self.router.port

    @property
    def index_port(self):
        return self.router.admin_port

    def admin(self, path):
        return self.router.admin(path)

    def routers(self):
        return [self.router]

    def sources(self):
        """The index's digest of every worker; nothing while its copies differ."""
        return digests(self.index_port)

    def feeds(self):
        """How the engines' events come in."""
        return [
            {"worker": worker["entry"]["worker"], **feed}
            for worker in self.admin("/workers")["workers"]
            for feed in worker["event_feeds"]
        ]

    def stop(self):
        self.router.stop()


class Distributed:
    """A nats-server, a shim beside each engine, two indexers, two routers that take turns."""

    def __init__(self, engines, options):
        self.options = options
        self.parts = []
        self.turn = 0
        [self.nats_port] = free_ports(1)
        for old in ("streams", "state"):
            shutil.rmtree(options.logs / old, ignore_errors=True)
        self.start_nats()
        try:
            self.start(engines, options)
        except BaseException:
            self.stop()
            raise

    def start(self, engines, options):
        self.plane = ["--nats-url", f"nats://{HOST}:{self.nats_port}", "--namespace", "real"]
        init = [options.indexer, "init", *self.plane]
        made = subprocess.run(init, capture_output=True, text=True, check=False)
        if made.returncode:
            raise Failed(f"init: {made.stderr}")
        own = [*self.plane, "--host", HOST, "--port", "0"]
        self.shims = {}
        for engine in engines:
            self.add(engine)
        self.indexers = [self.part(f"indexer-{n}", [options.indexer, *own]) for n in (1, 2)]
        self.both = []
        for number in (1, 2):
            self.both.append(Router(f"router-{number}", self.plane, options))
            self.parts.append(self.both[-1])
        for part in self.parts:
            wait_for(f"{part.name} is ready", part.is_ready)

    def part(self, name, command):
        self.parts.append(Part(name, command, self.options))
        return self.parts[-1]

    def add(self, engine):
        self.shims[engine.name] = self.part(f"shim-{engine.name}", self.shim(engine))

    def shim(self, engine):
        url = f"http://{HOST}:{engine.port}"
        return [
            *(self.options.shim, *self.plane, "--host", HOST, "--port", "0", "--worker-id", engine.name),
            *("--worker-url", url, "--advertise-url", url),
            *("--kv-endpoint", f"tcp://{HOST}:{engine.kv_port}"),
            *("--kv-replay-endpoint", f"tcp://{HOST}:{engine.replay_port}"),
            *("--state-dir", str(self.options.logs / "state")),
        ]

    def start_nats(self):
        store = str(self.options.logs / "streams")
        command = [self.options.nats_server, "-js", "-a", HOST, "-p", str(self.nats_port), "-sd", store]
        with (self.options.logs / "nats.log").open("ab") as log:
            self.nats = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_for("nats-server listens", lambda: is_listening(self.nats_port))

    def kill_nats(self):
        send(self.nats.pid, signal.SIGKILL)
        self.nats.wait()

    @property
    def port(self):
        self.turn += 1
        return self.both[self.turn % 2].port

    @property
    def index_port(self):
        self.turn += 1
        return self.indexers[self.turn % 2].port

    def admin(self, path):
        return self.both[self.turn % 2].admin(path)

    def routers(self):
        return self.both

    def sources(self):
        """As of the shims; nothing unless both indexers have that."""
        shims = [digests(shim.port) for shim in self.shims.values()]
        held = {name: source for shim in shims for name, source in shim.items()}
        keys = ("generation", "number", "blocks", "digest", "state")
        for indexer in self.indexers:
            for name, source in digests(indexer.port).items():
                known = held.get(name, {})
                if any(source[key] != known.get(key) for key in keys):
                    return {}
        return held

    def feeds(self):
        found = []
        for name, shim in self.shims.items():
            text = call(shim.port, "GET", "/metrics")[2].decode()
            lines = [line for line in text.splitlines() if not line.startswith("#")]
            values = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}
            age = values["warmroute_shim_proof_age_seconds"]
            feed = {"worker": name, "proof_age_ms": None if age < 0 else age * 1000}
            for count in FEED_COUNTS:
                total = "" if count == "orphans" else "_total"
                feed[count] = int(values[f"warmroute_shim_{count}{total}"])
            found.append(feed)
        return found

    def stop(self):
        for part in reversed(self.parts):
            part.stop()
        self.nats.terminate()
        self.nats.wait()
