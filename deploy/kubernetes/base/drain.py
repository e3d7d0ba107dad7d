"""preStop hook of a worker: drains it at a router and waits until its requests have ended.

The drain ends with this life of the worker. After DRAIN_SECONDS the hook ends, and the engine gets
SIGTERM. It fails if no router has drained the worker by then, and earlier if the routers refuse its
key or do not know the worker: an undrained worker goes on getting requests.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request

# A router that gets the drain late may send a request for about a second.
QUIET_SECONDS = 2
# A router applies a change of its keys within two seconds, and knows a new worker within one.
REFUSED_SECONDS = 5
DEADLINE = time.monotonic() + float(os.environ.get("DRAIN_SECONDS", "120"))
KEY_FILE = os.environ.get("WARMROUTE_ADMIN_KEY_FILE")
WORKER = f"{os.environ['WARMROUTE_ADMIN_URL']}/admin/workers/{os.environ['POD_NAME']}/drain"


def headers():
    found = {"X-Warmroute-Admin": "1"}
    if KEY_FILE and os.path.exists(KEY_FILE):
        with open(KEY_FILE, encoding="utf-8") as file:
            found["Authorization"] = f"Bearer {file.read().strip()}"
    return found


def call(method, url):
    request = urllib.request.Request(url, method=method, headers=headers())
    with urllib.request.urlopen(request, timeout=5) as answer:
        return json.load(answer)


def is_refusal(error):
    return isinstance(error, urllib.error.HTTPError) and error.code in (401, 403, 404)


def main():
    drained = quiet_since = refused_since = None
    while time.monotonic() < DEADLINE:
        failure = None
        try:
            # A restart of the shim alone ends the drain, too.
            if drained is None or call("GET", WORKER)["state"] != "draining":
                call("POST", f"{WORKER}?until=restart")
                drained = time.monotonic()
            is_idle = call("GET", WORKER)["requests"] == 0
        except (OSError, ValueError, KeyError) as error:
            print(f"no usable answer of a router: {error}", flush=True)
            is_idle, failure = False, error
        now = time.monotonic()
        if drained is None and is_refusal(failure):
            refused_since = refused_since or now
            if now - refused_since >= REFUSED_SECONDS:
                sys.exit(f"not drained: {failure} from {WORKER}, with the key of {KEY_FILE}")
        else:
            refused_since = None
        quiet_since = (quiet_since or now) if is_idle else None
        if quiet_since and now - quiet_since >= QUIET_SECONDS:
            return
        time.sleep(0.5)
    if drained is None:
        sys.exit("not drained: no router has answered")


main()
