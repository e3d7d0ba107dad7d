"""preStop hook of a worker: drains it at a router and waits until its requests have ended.

The drain ends with this life of the worker. Without an answer of any router the hook ends after
DRAIN_SECONDS like one whose requests do not end: the engine then gets SIGTERM.
"""

import json
import os
import time
import urllib.request

# A router that gets the drain late may send a request for about a second.
QUIET_SECONDS = 2
DEADLINE = time.monotonic() + float(os.environ.get("DRAIN_SECONDS", "120"))
WORKER = f"{os.environ['WARMROUTE_ADMIN_URL']}/admin/workers/{os.environ['POD_NAME']}/drain"


def headers():
    found = {"X-Warmroute-Admin": "1"}
    path = os.environ.get("WARMROUTE_ADMIN_KEY_FILE")
    if path and os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            found["Authorization"] = f"Bearer {file.read().strip()}"
    return found


def call(method, url):
    request = urllib.request.Request(url, method=method, headers=headers())
    with urllib.request.urlopen(request, timeout=5) as answer:
        return json.load(answer)


def main():
    drained = quiet_since = None
    while time.monotonic() < DEADLINE:
        try:
            if drained is None:
                call("POST", f"{WORKER}?until=restart")
                drained = time.monotonic()
            is_idle = call("GET", WORKER)["requests"] == 0
        except (OSError, ValueError, KeyError) as error:
            print(f"no usable answer of a router: {error}", flush=True)
            is_idle = False
        now = time.monotonic()
        quiet_since = (quiet_since or now) if is_idle else None
        if quiet_since and now - quiet_since >= QUIET_SECONDS:
            return
        time.sleep(0.5)


main()
