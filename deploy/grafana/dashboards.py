#!/usr/bin/env python3
"""Writes the dashboards of this directory: `dashboards.py` here, `dashboards.py --check` compares."""

import json
import pathlib
import sys

HERE = pathlib.Path(__file__).parent
R = "warmroute_router_"
I = "warmroute_indexer_"
S = "warmroute_shim_"
N = "warmroute_nats_"

OF_MODEL = '{model=~"$model"}'
OF_WORKER = '{worker=~"$worker"}'
OF_BOTH = '{model=~"$model",worker=~"$worker"}'
OF_INSTANCE = '{instance=~"$instance"}'
DROPPED = '{outcome="dropped",instance=~"$instance"}'


def rate(series):
    return f"rate({series}[$__rate_interval])"


def quantile(q, series, by=""):
    groups = f"le,{by}" if by else "le"
    return f"histogram_quantile({q}, sum by ({groups}) ({rate(series)}))"


def quantiles(series, by=""):
    legend = "".join(f" {{{{{label}}}}}" for label in by.split(",") if label)
    return [(quantile(q, series, by), f"p{round(q * 100)}{legend}") for q in (0.5, 0.95, 0.99)]


def total(series, by, legend=None):
    return (f"sum by ({by}) ({rate(series)}) or on() vector(0)", legend or f"{{{{{by}}}}}")


def share(part, whole):
    """The rate of a part that may have no series yet, over that of the whole."""
    return f"(sum({rate(part)}) or on() vector(0)) / clamp_min(sum({rate(whole)}), 1e-9)"


def panel(title, unit, *targets, kind="timeseries", width=8, about="", stack=False):
    return dict(title=title, unit=unit, targets=targets, kind=kind, width=width, about=about, stack=stack)


def stat(title, unit, query, about=""):
    return panel(title, unit, (query, ""), kind="stat", width=4, about=about)


REQUESTS = f"{R}model_requests_total"
FAILED = f'{REQUESTS}{{model=~"$model",outcome=~"engine_5xx|failed|shed"}}'
CACHED, PROMPT = f"{R}model_cached_tokens_total", f"{R}model_prompt_tokens_total"

FLEET = [
    stat("Requests", "reqps", f"sum({rate(REQUESTS + OF_MODEL)})"),
    stat("Failed or shed", "percentunit", share(FAILED, REQUESTS + OF_MODEL)),
    stat("Cache hit rate", "percentunit", share(CACHED + OF_MODEL, PROMPT + OF_MODEL),
         "Cached over all prompt tokens, as engines report them (--enable-prompt-tokens-details)."),
    stat("TTFT p95", "s", quantile(0.95, f"{R}model_ttft_seconds_bucket{OF_MODEL}")),
    stat("Healthy workers", "none", f"count(max by (worker) ({R}worker_healthy) == 1) or on() vector(0)"),
    stat("Waiting requests", "none", f"sum({R}waiting_requests)"),
    panel("Requests by outcome", "reqps", total(REQUESTS + OF_MODEL, "outcome"), stack=True),
    panel("Time to first token", "s", *quantiles(f"{R}model_ttft_seconds_bucket{OF_MODEL}"),
          about="Streamed answers only, from the request's head."),
    panel("Between tokens", "s", *quantiles(f"{R}model_inter_token_seconds_bucket{OF_MODEL}")),
    panel("Whole requests", "s", *quantiles(f"{R}model_request_seconds_bucket{OF_MODEL}")),
    panel("Wait for a worker", "s", *quantiles(f"{R}model_queue_seconds_bucket{OF_MODEL}")),
    panel("Tokens", "short",
          (f"sum({rate(PROMPT + OF_MODEL)})", "prompt"),
          (f"sum({rate(f'{R}model_credited_tokens_total{OF_MODEL}')})", "credited"),
          (f"sum({rate(CACHED + OF_MODEL)})", "cached"),
          (f"sum({rate(f'{R}model_output_tokens_total{OF_MODEL}')})", "output"),
          about="Per second. Credited above cached for long: engines find less than the index says."),
    panel("Cache hit rate by model", "percentunit",
          (f"sum by (model) ({rate(CACHED + OF_MODEL)}) / sum by (model) ({rate(PROMPT + OF_MODEL)})",
           "{{model}}")),
    panel("Decisions by what they rest on", "reqps", total(f"{R}ladder_total", "step"), stack=True),
    panel("Requests by model", "reqps", total(REQUESTS + OF_MODEL, "model"), stack=True),
    panel("Answers by status code", "reqps", total(REQUESTS + OF_MODEL, "code"), stack=True),
    panel("Open requests by worker", "none",
          (f"sum by (worker) (max by (worker, dp_rank) ({R}slots_active))", "{{worker}}"), width=12),
    panel("Workers", "none",
          (f"count(max by (worker) ({R}worker_registered) == 1) or on() vector(0)", "registered"),
          (f"count(max by (worker) ({R}worker_healthy) == 1) or on() vector(0)", "healthy"),
          (f"count(max by (worker) ({R}worker_draining) == 1) or on() vector(0)", "drained"), width=12),
]

SOURCE = "{{worker}}/{{dp_rank}}"
WORKER = [
    panel("Requests", "reqps", total(REQUESTS + OF_BOTH, "worker")),
    panel("Failed", "reqps",
          total(f'{REQUESTS}{{model=~"$model",worker=~"$worker",outcome=~"engine_5xx|failed"}}', "worker")),
    panel("Answers by status code", "reqps", total(REQUESTS + OF_BOTH, "worker,code", "{{worker}} {{code}}")),
    panel("Cache hit rate", "percentunit",
          (f"sum by (worker) ({rate(CACHED + OF_BOTH)}) / sum by (worker) ({rate(PROMPT + OF_BOTH)})",
           "{{worker}}")),
    panel("Time to first token", "s",
          *quantiles(f"{R}model_ttft_seconds_bucket{OF_BOTH}", "worker")[1:2]),
    panel("Between tokens", "s",
          *quantiles(f"{R}model_inter_token_seconds_bucket{OF_BOTH}", "worker")[1:2]),
    panel("Whole requests", "s",
          *quantiles(f"{R}model_request_seconds_bucket{OF_BOTH}", "worker")[1:2]),
    panel("Open requests", "none",
          (f"max by (worker, dp_rank) ({R}slots_active{OF_WORKER})", SOURCE)),
    panel("Tokens to prefill", "none",
          (f"max by (worker, dp_rank) ({R}slots_prefill_tokens{OF_WORKER})", SOURCE)),
    panel("Blocks of open requests", "none",
          (f"max by (worker, dp_rank) ({R}slots_decode_blocks{OF_WORKER})", SOURCE)),
    panel("Health, by the routers' checks", "none",
          (f"min by (worker) ({R}worker_healthy{OF_WORKER})", "{{worker}}")),
    panel("Failed checks of tokenizer and blocks", "none",
          (f"max by (worker, check) ({R}worker_check_failed{OF_WORKER}) or on() vector(0)",
           "{{worker}} {{check}}"),
          about="1: router and engine tokenize differently, so that such prompts are routed by load."),
    panel("Observed over expected TTFT", "none",
          (f"max by (worker, dp_rank) ({R}source_ttft_ratio{OF_WORKER}) or on() vector(0)", SOURCE),
          about="Known after some requests. Above 1: slower than the median rank."),
    panel("Index state", "none",
          (f"max by (worker, dp_rank, state) ({I}source_state{OF_WORKER})", SOURCE + " {{state}}")),
    panel("Blocks in the index", "none",
          (f"max by (worker, dp_rank) ({I}source_blocks{OF_WORKER})", SOURCE)),
    panel("Credit ignored", "none",
          (f"max by (worker, dp_rank) ({R}source_demoted{OF_WORKER}) or on() vector(0)", SOURCE),
          about="1: the engine contradicted the index; the router ignores its credit."),
    panel("Event batches", "short",
          (f"sum by (worker, dp_rank) ({rate(f'{S}batches_total{OF_WORKER}')})", SOURCE)),
    panel("Age of the shim's proof", "s",
          (f"max by (worker, dp_rank) ({S}proof_age_seconds{OF_WORKER})", SOURCE)),
    panel("Gaps, restarts and resyncs", "short",
          (f"sum by (worker, dp_rank) ({rate(f'{S}gaps_total{OF_WORKER}')})", SOURCE + " gaps"),
          (f"sum by (worker, dp_rank) ({rate(f'{S}restarts_total{OF_WORKER}')})", SOURCE + " restarts"),
          (f"sum by (worker, dp_rank) ({rate(f'{S}resyncs_total{OF_WORKER}')}) or on() vector(0)",
           SOURCE + " resyncs")),
]


def routers(name):
    return f"{R}{name}{OF_INSTANCE}"


ROUTER = [
    panel("Requests by router", "reqps", total(routers("requests_total"), "instance")),
    panel("Requests by outcome", "reqps", total(routers("requests_total"), "outcome"), stack=True),
    panel("Requests by route", "reqps", total(routers("requests_total"), "route"), stack=True),
    panel("From body to sending", "s", *quantiles(routers("decision_seconds_bucket")),
          about="What the router adds before it sends a request, waits for a worker included."),
    panel("Steps of a decision, p99", "s",
          (quantile(0.99, routers("decision_step_seconds_bucket"), "step"), "{{step}}")),
    panel("Decisions by what they rest on", "reqps", total(routers("ladder_total"), "step"), stack=True),
    panel("Prompts without block hashes", "reqps", total(routers("unhashed_requests_total"), "reason")),
    panel("Index queries without an answer", "reqps", total(routers("index_failures_total"), "instance")),
    panel("Retries", "reqps", total(routers("retries_total"), "reason")),
    panel("Attempts that engines failed", "reqps", total(routers("engine_failures_total"), "kind"), stack=True),
    panel("Retries left", "none", (routers("retries_left"), "{{instance}}"),
          about="By the budget of retries, for the last minute."),
    panel("Workers passed over", "none",
          (f"max by (worker, reason) ({routers('worker_passed_over')}) or on() vector(0)", "{{worker}} {{reason}}")),
    panel("Aborted by clients", "reqps", total(routers("upstream_cancels_total"), "phase")),
    panel("Connections and waits", "none",
          (f"sum by (instance) ({routers('connections')})", "{{instance}} connections"),
          (f"sum by (instance) ({routers('waiting_requests')})", "{{instance}} waiting")),
    panel("Bytes of bodies and prompt work", "bytes",
          (f"sum by (instance) ({routers('buffered_bytes')})", "{{instance}}")),
    panel("Token cache, hit share of bytes", "percentunit",
          (share(f'{R}token_cache_bytes_total{{result="hit",instance=~"$instance"}}',
                 routers("token_cache_bytes_total")), "hit")),
    panel("Credited and reported tokens", "short",
          (f"sum({rate(routers('overlap_credited_tokens_total'))})", "credited"),
          (f"sum({rate(routers('overlap_reported_tokens_total'))})", "reported")),
    panel("Answers with less cached than credited", "reqps",
          total(routers("overlap_short_requests_total"), "instance")),
    panel("Moved requests", "reqps", total(routers("moves_total"), "outcome")),
    panel("Other routers seen", "none", (routers("sync_peers"), "{{instance}}")),
    panel("Difference of load views", "none", (routers("sync_divergence_requests"), "{{instance}}")),
    panel("Lost log lines and records", "short",
          (f"sum({rate(R + 'access_log_lines_total' + DROPPED)}) or on() vector(0)", "access log"),
          (f"sum({rate(R + 'recorded_requests_total' + DROPPED)}) or on() vector(0)", "recording")),
    panel("Settings files refused", "short",
          (f'sum(increase({R}settings_reloads_total{{outcome="refused"}}[1h])) or on() vector(0)', "refused")),
    panel("Versions", "none",
          ("count by (version, commit) (warmroute_build_info)", "{{version}} {{commit}}")),
]

PLANE = [
    panel("Sources by state, of the worst indexer", "none",
          (f"max by (state) ({I}sources)", "{{state}}"), stack=True),
    panel("Behind the log", "s", (f"{I}log_lag_seconds", "{{instance}}"),
          about="-1: not caught up within 8 s."),
    panel("From the log to answers", "s", *quantiles(f"{I}event_to_visible_seconds_bucket")),
    panel("Records by verdict", "short", total(f"{I}records_total", "verdict")),
    panel("Queries by outcome", "reqps", total(f"{I}queries_total", "outcome")),
    panel("Resyncs asked for", "short", total(f"{I}resyncs_total", "reason")),
    panel("Blocks in the tree", "none", (f"{I}tree_blocks", "{{instance}}")),
    panel("Memory of indexers", "bytes",
          (f"{I}resident_bytes", "{{instance}} process"),
          (f"{I}memory_estimated_bytes", "{{instance}} index")),
    panel("Age of the newest snapshot", "s", (f"{I}snapshot_age_seconds", "{{instance}}"),
          about="-1: none. Grows while no record arrives."),
    panel("Snapshots by outcome", "short", total(f"{I}snapshots_total", "outcome")),
    panel("Heartbeats by verdict", "short", total(f"{I}heartbeats_total", "verdict")),
    panel("Foreign or impossible messages", "short",
          (f'sum(increase({I}records_total{{verdict=~"wrong_source|wrong_subject|implausible"}}[15m]))'
           f' + sum(increase({I}heartbeats_total{{verdict=~"wrong_source|wrong_subject|implausible"}}[15m]))'
           " or on() vector(0)", "in 15 minutes")),
    panel("Bytes that shims have not logged", "bytes", (f"sum by (worker) ({S}outbox_bytes)", "{{worker}}")),
    panel("Appends sent again", "short", total(f"{S}appends_failed_total", "worker")),
    panel("Load messages of routers", "short", total(f"{R}sync_messages_total", "direction")),
    panel("Repairs between routers", "short", total(f"{R}sync_repairs_total", "kind")),
    panel("NATS reconnects", "short", total(f"{N}disconnects_total", "instance")),
    panel("NATS permission and server errors", "short",
          (f"sum by (instance) (increase({N}server_errors_total[15m]))", "{{instance}}")),
    panel("NATS bytes", "Bps", (f"sum by (instance) ({rate(f'{N}in_bytes_total')})", "{{instance}} in"),
          (f"sum by (instance) ({rate(f'{N}out_bytes_total')})", "{{instance}} out")),
]


def variable(name, query):
    return {
        "name": name, "label": name, "type": "query", "multi": True, "includeAll": True,
        "allValue": ".*", "current": {"text": ["All"], "value": ["$__all"]}, "refresh": 2, "sort": 1,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": query, "refId": "variable"},
    }


MODELS = variable("model", f"label_values({REQUESTS}, model)")
WORKERS = variable("worker", f"label_values({R}worker_healthy, worker)")
INSTANCES = variable("instance", f"label_values({R}connections, instance)")

DASHBOARDS = {
    "fleet": ("Warmroute: fleet", [MODELS], FLEET),
    "worker": ("Warmroute: workers", [MODELS, WORKERS], WORKER),
    "router": ("Warmroute: routers", [INSTANCES], ROUTER),
    "plane": ("Warmroute: plane", [], PLANE),
}


def placed(panels):
    x = y = row = 0
    for number, one in enumerate(panels, 1):
        height = 4 if one["kind"] == "stat" else 8
        if x + one["width"] > 24:
            x, y = 0, y + row
        yield grafana_panel(number, one, {"h": height, "w": one["width"], "x": x, "y": y})
        x, row = x + one["width"], height


def grafana_panel(number, one, place):
    source = {"type": "prometheus", "uid": "${datasource}"}
    options = {} if one["kind"] == "stat" else {"tooltip": {"mode": "multi"}, "legend": {"showLegend": True}}
    stacking = {"stacking": {"mode": "normal"}, "fillOpacity": 30} if one["stack"] else {}
    targets = [
        {"refId": chr(65 + at), "datasource": source, "expr": query, "legendFormat": legend}
        for at, (query, legend) in enumerate(one["targets"])
    ]
    return {
        "id": number, "title": one["title"], "description": one["about"], "type": one["kind"],
        "gridPos": place, "datasource": source, "targets": targets, "options": options,
        "fieldConfig": {"defaults": {"unit": one["unit"], "custom": stacking}, "overrides": []},
    }


def dashboard(name):
    title, variables, panels = DASHBOARDS[name]
    source = {"name": "datasource", "label": "datasource", "type": "datasource", "query": "prometheus"}
    return {
        "uid": f"warmroute-{name}", "title": title, "tags": ["warmroute"], "schemaVersion": 38,
        "editable": True, "refresh": "10s", "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source, *variables]}, "panels": list(placed(panels)),
    }


def main():
    stale = []
    for name in DASHBOARDS:
        file = HERE / f"{name}.json"
        text = json.dumps(dashboard(name), indent=1) + "\n"
        if "--check" not in sys.argv:
            file.write_text(text)
        elif not file.exists() or file.read_text() != text:
            stale.append(file.name)
    if stale:
        sys.exit(f"not as dashboards.py writes them: {', '.join(stale)}")


if __name__ == "__main__":
    main()
