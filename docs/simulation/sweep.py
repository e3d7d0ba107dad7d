#!/usr/bin/env python3
"""Runs the comparisons of docs/SIMULATION.md and writes their tables and plots.

    cargo build --release -p warmroute-router
    python3 docs/simulation/sweep.py --traces DIR

DIR holds the traces of `TRACES` below. Runs that are in the results file already are not run again, so
that the sweep can be stopped and continued. Every run is one call of `warmroute-router simulate`, whose
output depends on its flags alone. Needs nothing but Python.

Differences are of logarithms: two runs that chance alone tells apart differ by nothing on average then,
which the mean of their quotients does not do (it is above one, by the square of the runs' spread). What
others are held against is one router's mean over several draws of its ties, since the luck of a single run
would be in every comparison with it. Cells of N routers in step get more seeds until their interval is
narrow; how wide it is decides that, never where it lies.
"""

import argparse
import concurrent.futures
import itertools
import json
import math
import pathlib
import statistics
import subprocess

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
# File, requests of a run, tokens a block. Whole sessions: all of them, so that many can be open at once.
# Blocks of 16 tokens give the same picture and take four times as long.
TRACES = {
    "conversation": ("mooncake_conversation_trace.jsonl", 3000, 64),
    "tools": ("tools_a.jsonl", 6000, 64),
    "agent": ("agent_a.jsonl", 4202, 128),
}
WORKERS = [8, 16]
LOADS = [0.5, 0.8, 0.95]
ROUTERS = [2, 4, 8]
SYNCS = ["1", "5", "off"]
POLICIES = ["round-robin", "least-load", "random"]
# The same with workers that are about a third as fast, on the larger fleet.
SLOW, SLOW_LOADS, SLOW_TRACES = "gpu-70b", [0.8, 0.95], ["conversation", "tools"]
KNOBS = {"overlap-score-weight": [0.5, 2, 4, 8], "router-temperature": [0.05, 0.2, 1]}
KNOB_LOADS = [0.8]
# Draws of one router's ties; seeds of a round, and of all rounds; the half interval of the mean TTFT that needs no
# further round, in percent.
DRAWS = 3
ROUND, SEEDS_MAX, NARROW = 10, 100, 1.0
METRICS = {"hit_rate": "hit rate", "ttft_mean_ms": "mean TTFT", "ttft_p99_ms": "p99 TTFT"}
# What N routers may be worse by than one, in percent: hit rate, mean TTFT, p99 TTFT.
TARGETS = {"1": (2, 2, 5), "5": (5, 5, 10)}
# Of what the simulator's figures mean; results of another one are run again. 2: a moved request's cached tokens
# count once, where it was answered.
VERSION = 2
# Two-sided 95 % quantiles of Student's t by degrees of freedom, up to nine.
STUDENT = [math.nan, 12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262]


def first_round():
    """Of routers in step, and of one: every run as the flags that tell it from others."""
    for seed, base in itertools.product(range(1, ROUND + 1), usual() + slow()):
        yield from ({**cell, "seed": seed} for cell in drawn(base) + replicated(base, TARGETS))


def others():
    """Without sync, other policies, other knobs."""
    seeds = range(1, ROUND + 1)
    for seed, base in itertools.product(seeds, usual() + slow()):
        yield from ({**cell, "seed": seed} for cell in replicated(base, ["off"]))
    for seed, (trace, load) in itertools.product(seeds, itertools.product(TRACES, LOADS)):
        base = {**base_of(trace, WORKERS[0], load), "seed": seed}
        for policy in POLICIES:
            yield {**base, "policy": policy}
        for key, values in KNOBS.items():
            for value in values if load in KNOB_LOADS else []:
                yield {**base, key: value}


def another_round(results, seeds):
    """More of the cells that chance still hides."""
    found = Found(results)
    for base in usual() + slow():
        wide = [cell for cell in replicated(base, TARGETS) if interval(found.against("ttft_mean_ms", cell, base))[1] > NARROW]
        for seed in seeds if wide else []:
            yield from ({**cell, "seed": seed} for cell in drawn(base) + wide)


def drawn(base):
    """One router, once for each draw of its ties."""
    return [base, *({**base, "draw": draw} for draw in range(1, DRAWS))]


def replicated(base, syncs):
    return [{**base, "routers": routers, "sync-ms": sync} for routers, sync in itertools.product(ROUTERS, syncs)]


def name(cell):
    return json.dumps(cell, sort_keys=True)


def place_of(cell):
    return {key: cell[key] for key in ("trace", "workers", "profile") if key in cell}


def simulate(options, cell, more=()):
    file, _, block = TRACES[cell["trace"]]
    path = pathlib.Path(options.traces) / file
    flags = [f"--{key}={value}" for key, value in {"policy": "kv", **cell}.items() if key != "trace"]
    command = [options.binary, "simulate", "--json", f"--trace={path}", *flags, *more]
    command += [f"--block-size={options.block_size or block}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr}")
    return json.loads(done.stdout)


def load_results(path):
    found = {}
    if path.exists():
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if row.get("version") != VERSION:
                continue
            found[name(row["cell"])] = row["figures"]
    return found


def capacity_of(options, place, path):
    """Measured once; kept beside the results, since runs of one pair must have the same to the last digit."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    if name(place) not in kept:
        kept[name(place)] = simulate(options, place, ["--requests=1"])["capacity"]
        path.write_text(json.dumps(kept, indent=1) + "\n")
    return kept[name(place)]


def sweep(options, results):
    run(options, results, first_round())
    for last in range(2 * ROUND, SEEDS_MAX + 1, ROUND):
        seeds = range(last - ROUND + 1, last + 1)
        run(options, results, another_round(load_results(results), seeds))
    run(options, results, others())
    return load_results(results)


def run(options, results, cells):
    found = load_results(results)
    wanted = [cell for cell in cells if name(cell) not in found]
    capacities = {name(place_of(cell)): None for cell in wanted}
    for place in capacities:
        path = results.with_suffix(".capacities.json")
        capacities[place] = capacity_of(options, json.loads(place), path)
    keep = ["capacity", "rate", "requests", "refused", "moved_share", "hit_rate", "ttft_mean_ms", "ttft_p50_ms", "ttft_p99_ms",
            "itl_mean_ms", "e2e_mean_ms", "goodput", "busiest_worker", "stalls",
            "sync_messages_per_request", "sync_bytes_per_request"]

    def one(cell):
        capacity = capacities[name(place_of(cell))]
        more = [f"--capacity={capacity!r}", f"--requests={TRACES[cell['trace']][1]}"]
        figures = simulate(options, cell, more)
        kept = {key: float(f"{figures[key]:.6g}") for key in keep if key in figures}
        return {"cell": cell, "version": VERSION, "figures": kept}

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool, results.open("a") as out:
        for number, row in enumerate(pool.map(one, wanted), 1):
            out.write(json.dumps(row) + "\n")
            out.flush()
            if number % 50 == 0 or number == len(wanted):
                print(f"{number} of {len(wanted)} runs", flush=True)


def student(freedom):
    """From ten degrees on by the first terms of its expansion, right to three digits."""
    return STUDENT[freedom] if freedom < len(STUDENT) else 1.96 + 2.372 / freedom + 2.82 / freedom**2


def interval(logs):
    """The mean and half of its 95 % confidence interval, in percent of what the logarithms are held against."""
    mean = math.exp(statistics.mean(logs))
    half = student(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
    return 100 * (mean - 1), 100 * mean * half


class Found:
    def __init__(self, results, seeds=range(1, SEEDS_MAX + 1)):
        self.results, self.seeds = results, seeds

    def at(self, metric, cell, seed):
        row = self.results.get(name({**cell, "seed": seed}))
        return row and row[metric]

    def values(self, metric, **cell):
        values = (self.at(metric, cell, seed) for seed in self.seeds)
        return [value for value in values if value is not None]

    def alone(self, metric, base, seed):
        """Logarithms of one router's figures, a draw each; empty while one is missing."""
        draws = [self.at(metric, cell, seed) for cell in drawn(base)]
        return [math.log(value) for value in draws] if all(draws) else []

    def against(self, metric, cell, base):
        """Logarithms of a cell's figures over those of one router, seed by seed."""
        both = ((self.at(metric, cell, seed), self.alone(metric, base, seed)) for seed in self.seeds)
        return [math.log(value) - statistics.mean(alone) for value, alone in both if value and alone]

    def chance(self, metric, base):
        """What one run of one router differs from another by, if chance alone tells them apart: the standard
        deviation of one, in percent."""
        draws = (self.alone(metric, base, seed) for seed in self.seeds)
        spreads = [statistics.variance(logs) for logs in draws if logs]
        return 100 * math.sqrt(statistics.mean(spreads)) if spreads else math.nan


def shown(samples):
    if not samples:
        return "–"
    mean, half = interval(samples)
    return f"{mean:+.1f} ± {half:.1f}"


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def places():
    return itertools.product(TRACES, WORKERS, LOADS)


def base_of(trace, workers, load):
    return {"trace": trace, "workers": workers, "load": load, "routers": 1, "sync-ms": "off"}


def one_router(found, rows_of):
    head = ["trace", "workers", "load", "rate", "hit rate", "mean TTFT", "p99 TTFT", "mean ITL", "goodput"]
    head += [f"chance: {title}" for title in METRICS.values()]
    rows = []
    for base in rows_of:
        mean = {}
        for metric in ["rate", *METRICS, "itl_mean_ms", "goodput"]:
            values = found.values(metric, **base)
            mean[metric] = statistics.mean(values) if values else math.nan
        rows.append([
            base["trace"], str(base["workers"]), f"{base['load']:.0%}", f"{mean['rate']:.3g}", f"{mean['hit_rate']:.1%}",
            f"{mean['ttft_mean_ms']:.0f} ms", f"{mean['ttft_p99_ms']:.0f} ms",
            f"{mean['itl_mean_ms']:.1f} ms", f"{mean['goodput']:.1%}",
            *(f"{found.chance(metric, base):.1f} %" for metric in METRICS),
        ])
    return table(head, rows)


def many_routers(found, metric, rows_of):
    head = ["trace", "workers", "load"]
    head += [f"{n}, {s if s == 'off' else s + ' ms'}" for s in SYNCS for n in ROUTERS]
    rows = []
    for base in rows_of:
        row = [base["trace"], str(base["workers"]), f"{base['load']:.0%}"]
        for sync, routers in itertools.product(SYNCS, ROUTERS):
            row.append(shown(found.against(metric, {**base, "routers": routers, "sync-ms": sync}, base)))
        rows.append(row)
    return table(head, rows)


def usual():
    return [base_of(*place) for place in places()]


def slow():
    at = itertools.product(SLOW_TRACES, WORKERS[1:], SLOW_LOADS)
    return [{**base_of(*place), "profile": SLOW} for place in at]


def unseen(found):
    """How much later first tokens come, by how many requests come to the fleet within the delay: behind a
    round-robin balancer the one just before always went to another router."""
    bounds = [0, 0.02, 0.05, 0.1, 0.2, 0.4, 10]
    cells = {}
    for base, routers, sync in itertools.product(usual() + slow(), ROUTERS, ["1", "5"]):
        rates = found.values("rate", **base)
        if base["trace"] == "agent" or not rates:
            continue
        expected = statistics.mean(rates) * float(sync) / 1000
        cell = {**base, "routers": routers, "sync-ms": sync}
        samples = [found.against(metric, cell, base) for metric in METRICS]
        if all(samples):
            at = max(place for place, edge in enumerate(bounds) if edge <= expected)
            cells.setdefault((base["trace"], at), []).append([interval(sample)[0] for sample in samples])
    rows = []
    for (trace, at), means in sorted(cells.items()):
        columns = [f"{statistics.mean(column):+.1f} %" for column in zip(*means)]
        words = f"{bounds[at]:g} to {bounds[at + 1]:g}" if bounds[at + 1] < 10 else f"above {bounds[at]:g}"
        rows.append([trace, words, str(len(means))] + columns)
    return table(["trace", "requests within the delay", "cells", *METRICS.values()], rows)


def verdict(found, rows_of):
    """Cells within their target, by their mean and by their interval."""
    head = ["", "sync", "target", "mean of all cells", "worst cell", "cells beyond", "surely beyond", "surely within"]
    rows = []
    for at, (metric, title) in enumerate(METRICS.items()):
        sign = -1 if metric == "hit_rate" else 1
        for sync in SYNCS:
            target = TARGETS.get(sync, (None,) * 3)[at]
            means, beyond, within = [], 0, 0
            for base, routers in itertools.product(rows_of, ROUTERS):
                samples = found.against(metric, {**base, "routers": routers, "sync-ms": sync}, base)
                if samples:
                    mean, half = interval(samples)
                    means.append(sign * mean)
                    beyond += target is not None and sign * mean - half > target
                    within += target is not None and sign * mean + half < target
            if not means:
                continue
            some = sum(mean > target for mean in means) if target else None
            rows.append([
                title, sync if sync == "off" else f"{sync} ms", f"{target} %" if target else "–",
                f"{sign * statistics.mean(means):+.2f} %", f"{sign * max(means):+.1f} %",
                *([f"{some} of {len(means)}", str(beyond), str(within)] if target else ["–"] * 3),
            ])
    return table(head, rows)


def variants(found, key, values, metric_titles, loads):
    head = ["trace", "load"] + [f"{value}: {title}" for value in values for title in metric_titles.values()]
    rows = []
    for trace, workers, load in itertools.product(TRACES, WORKERS[:1], loads):
        base = base_of(trace, workers, load)
        row = [trace, f"{load:.0%}"]
        for value in values:
            row += [shown(found.against(metric, {**base, key: value}, base)) for metric in metric_titles]
        rows.append(row)
    return table(head, rows)


COLOURS = {"1": "#1b7f4d", "5": "#d98300", "off": "#b3262e"}
WIDTH, HEIGHT, LEFT, TOP = 250, 170, 62, 46
# In percent; what is beyond stands at the edge with its figure.
SHOWN = 30


def scale(lowest, highest):
    span = max(highest - lowest, 1e-9)
    step = 10 ** math.floor(math.log10(span / 3))
    step = next(step * factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 4)
    return math.floor(lowest / step) * step, math.ceil(highest / step) * step, step


def panel(found, trace, metric, x0, y0):
    """One trace and metric: difference from one router over routers, all loads and fleets together."""
    lines = {}
    for sync in SYNCS:
        points = [(1, 0.0, 0.0)]
        for routers in ROUTERS:
            by_seed = []
            for seed in range(1, ROUND + 1):
                alone = Found(found.results, [seed])
                samples = []
                for workers, load in itertools.product(WORKERS, LOADS):
                    base = base_of(trace, workers, load)
                    samples += alone.against(metric, {**base, "routers": routers, "sync-ms": sync}, base)
                if samples:
                    by_seed.append(statistics.mean(samples))
            if by_seed:
                points.append((routers, *interval(by_seed)))
        lines[sync] = points
    values = [v for points in lines.values() for _, mean, half in points for v in (mean - half, mean + half)]
    lowest, highest, step = scale(max(min(values + [-5]), -SHOWN), min(max(values + [5]), SHOWN))
    px = {1: 0.08, 2: 0.35, 4: 0.62, 8: 0.88}

    def y(value):
        inside = min(max(value, lowest), highest)
        return y0 + HEIGHT * (highest - inside) / (highest - lowest)

    out = [f'<rect x="{x0}" y="{y0}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>']
    target = TARGETS["1"][list(METRICS).index(metric)]
    top, bottom = min(target, highest), max(-target, lowest)
    out.append(f'<rect x="{x0}" y="{y(top):.1f}" width="{WIDTH}" height="{y(bottom) - y(top):.1f}" '
               'fill="#1b7f4d" opacity="0.10"/>')
    tick = lowest
    while tick <= highest + step / 2:
        out.append(f'<line x1="{x0}" x2="{x0 + WIDTH}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{x0 - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g} %</text>')
        tick += step
    for routers, share in px.items():
        out.append(f'<text x="{x0 + share * WIDTH:.0f}" y="{y0 + HEIGHT + 15}" text-anchor="middle">'
                   f"{routers}</text>")
    for offset, (sync, points) in zip((-3, 0, 3), lines.items()):
        at = [(x0 + px[n] * WIDTH + offset, y(mean), y(mean - half), y(mean + half)) for n, mean, half in points]
        path = " ".join(f"{x:.1f},{place:.1f}" for x, place, _, _ in at)
        out.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[sync]}" stroke-width="2"/>')
        for x, place, low, high in at:
            out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" '
                       f'stroke="{COLOURS[sync]}"/><circle cx="{x:.1f}" cy="{place:.1f}" r="3" '
                       f'fill="{COLOURS[sync]}"/>')
        for (x, place, _, _), (_, mean, _) in zip(at, points):
            if not lowest <= mean <= highest:
                under = place + (14 if mean > highest else -6)
                out.append(f'<text x="{x:.1f}" y="{under:.1f}" text-anchor="middle" '
                           f'fill="{COLOURS[sync]}">{mean:+.0f} %</text>')
    return "\n".join(out)


def plot(found):
    wide, high = LEFT + 3 * (WIDTH + 70), TOP + 3 * (HEIGHT + 62)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" '
           'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>']
    for at, (sync, colour) in enumerate(COLOURS.items()):
        words = "without sync" if sync == "off" else f"sync after {sync} ms"
        x = LEFT + at * 170
        out.append(f'<line x1="{x}" x2="{x + 24}" y1="14" y2="14" stroke="{colour}" stroke-width="3"/>'
                   f'<text x="{x + 30}" y="18">{words}</text>')
    for row, (metric, title) in enumerate(METRICS.items()):
        for column, trace in enumerate(TRACES):
            x0, y0 = LEFT + column * (WIDTH + 70), TOP + row * (HEIGHT + 62)
            out.append(f'<text x="{x0}" y="{y0 - 6}" font-weight="bold">{trace}: {title}</text>')
            out.append(panel(found, trace, metric, x0, y0))
            out.append(f'<text x="{x0 + WIDTH / 2}" y="{y0 + HEIGHT + 32}" text-anchor="middle">routers</text>')
    return "\n".join(out) + "\n</svg>\n"


def write(options, results):
    found = Found(results)
    both = {"hit_rate": "hit rate", "ttft_mean_ms": "mean TTFT", "ttft_p99_ms": "p99", "e2e_mean_ms": "e2e"}
    parts = ["<!-- Written by simulation/sweep.py. Differences are in percent of one router of policy kv with "
             f"default knobs, the geometric mean of {ROUND} paired seeds and its 95 % confidence interval; of N "
             f"routers in step {ROUND} to {SEEDS_MAX} seeds, more where chance is larger. Chance: the standard "
             "deviation of one run, if nothing but its ties is drawn again. -->\n"]
    fleets = {"": usual(), f"{WORKERS[1]} workers of profile {SLOW}:\n": slow()}
    fleets = {title: rows_of for title, rows_of in fleets.items() if any(found.values("rate", **rows_of[0]))}

    def section(title, make):
        parts.append(f"## {title}\n")
        for words, rows_of in fleets.items():
            parts.extend([words, make(rows_of)])

    section("One router", lambda rows_of: one_router(found, rows_of))
    section("N routers against one: summary", lambda rows_of: verdict(found, rows_of))
    parts += ["## What a sync delay costs\n", unseen(found)]
    for metric, title in METRICS.items():
        section(f"N routers against one: {title}", lambda rows_of: many_routers(found, metric, rows_of))
    parts += [f"## Other policies against kv, {WORKERS[0]} workers\n", variants(found, "policy", POLICIES, both, LOADS)]
    for title, (key, values) in zip(["Overlap score weight against 1", "Temperature against 0"], KNOBS.items()):
        parts += [f"## {title}, {WORKERS[0]} workers\n", variants(found, key, values, both, KNOB_LOADS)]
    (HERE / "tables.md").write_text("\n".join(parts))
    (HERE / "routers.svg").write_text(plot(found))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--traces", required=True, help="the directory of the traces")
    parser.add_argument("--binary", default=str(ROOT / "target/release/warmroute-router"))
    parser.add_argument("--results", default=str(HERE / "results.jsonl"), type=pathlib.Path)
    parser.add_argument("--block-size", type=int, help="tokens a block, for all traces")
    parser.add_argument("--jobs", default=1, type=int)
    options = parser.parse_args()
    write(options, sweep(options, options.results))


if __name__ == "__main__":
    main()
