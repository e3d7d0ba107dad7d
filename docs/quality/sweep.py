#!/usr/bin/env python3
"""Compares all policies by simulation and writes the tables of docs/WORKBENCH.md and its plot.

    cargo build --release -p warmroute-router
    python3 docs/quality/sweep.py --traces DIR

Each run is one call of `warmroute-router simulate`, whose output depends on its flags alone. Runs in the
results file are not repeated, so that a sweep can be stopped and continued: delete the file after a change
of the router. Needs only Python.
"""

import argparse
import itertools
import json
import math
import pathlib
import statistics
import subprocess

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
PAGE = HERE.parent / "WORKBENCH.md"
# File, requests of a run, tokens a block.
TRACES = {
    "conversation": ("mooncake_conversation_trace.jsonl", 1500, 64),
    "synthetic": ("mooncake_synthetic_trace.jsonl", 1500, 64),
    "tools": ("tools_a.jsonl", 3000, 64),
    "agent": ("agent_a.jsonl", 4202, 128),
}
BASE = "time"
CARD = "kv, weight 1"
WEIGHTS = {f"kv, weight {weight}": ["--policy=kv", f"--overlap-score-weight={weight}"] for weight in (1, 2, 4, 8, 16)}
POLICIES = {
    "time": ["--policy=time"],
    "kv, weight 1": WEIGHTS["kv, weight 1"],
    "kv, weight 8": WEIGHTS["kv, weight 8"],
    "approx": ["--policy=approx"],
    "prefix-hash": ["--policy=prefix-hash"],
    "session": ["--policy=session"],
    "least-load": ["--policy=least-load"],
    "power-of-two": ["--policy=power-of-two"],
    "round-robin": ["--policy=round-robin"],
    "random": ["--policy=random"],
}
# Without sessions it is least-load.
SESSION_TRACES = ["agent"]
LOADS = [0.8, 0.5, 0.95]
# Workers and profile. All policies run on the first fleet; `time` and the weights of `kv` on all.
FLEETS = ["8 × gpu-8b", "4 × gpu-8b", "16 × gpu-8b", "8 × gpu-70b", "4 × gpu-70b", "16 × gpu-70b"]
# The first fleet with unequal workers: load and flags.
UNEQUAL = {
    "half of them 2.5 × slower": (0.5, ["--slow-worker=2.5", "--slow-workers=4"]),
    "one 4 × slower for a minute": (0.7, ["--slow-worker=4", "--slow-secs=60"]),
}
ROUTERS = {f"4 routers, {delay} ms": ["--routers=4", f"--sync-ms={delay}"] for delay in (1, 5, 50)}
FLAGS = {
    **POLICIES,
    **WEIGHTS,
    **{name: [*POLICIES[BASE], *flags] for name, flags in ROUTERS.items()},
}
METRICS = {"ttft_mean_ms": "mean TTFT", "ttft_p99_ms": "p99 TTFT", "e2e_mean_ms": "mean time to the end"}
# How much longer the default may take than weight 1.
MARGINS = {"ttft_mean_ms": 1.03, "ttft_p99_ms": 1.05}
# Fewer seeds give no interval.
SEEDS_MIN = 3
# Two-sided 95 % quantiles of Student's t by degrees of freedom.
STUDENT = [math.nan, 12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262]


def names(fleet, trace, load):
    """The candidates of a fleet."""
    others = [BASE, *WEIGHTS]
    if fleet == FLEETS[0]:
        others += [name for name in POLICIES if name not in others]
        others += ROUTERS if load == LOADS[0] else []
    return [name for name in others if name != "session" or trace in SESSION_TRACES]


def cells(seeds):
    """All runs, as (fleet, trace, load, seed, candidate)."""
    equal = list(itertools.product(FLEETS, LOADS))
    for seed, (fleet, load), trace in itertools.product(range(1, seeds + 1), equal + unequal_fleets(), TRACES):
        for name in names(fleet, trace, load):
            yield fleet, trace, load, seed, name


def unequal_fleets():
    return [(f"{FLEETS[0]}, {what}", load) for what, (load, _) in UNEQUAL.items()]


class Sweep:
    def __init__(self, options):
        self.options = options
        self.found = {}
        if options.results.exists():
            rows = map(json.loads, options.results.read_text().splitlines())
            self.found = {tuple(row["cell"]): row["figures"] for row in rows}

    def run(self):
        for cell in cells(self.options.seeds):
            if cell not in self.found:
                fleet, trace, load, seed, name = cell
                equal, _, what = fleet.partition(", ")
                rate = self.capacity(equal, trace)
                _, count, _ = TRACES[trace]
                _, slow = UNEQUAL.get(what, (load, []))
                flags = [*FLAGS[name], *slow, f"--load={load}", f"--seed={seed}", f"--capacity={rate}", f"--requests={count}"]
                self.keep(cell, self.simulate(equal, trace, flags))

    def capacity(self, fleet, trace):
        cell = (fleet, trace, "capacity")
        if cell not in self.found:
            self.keep(cell, self.simulate(fleet, trace, ["--requests=1"]))
        return self.found[cell]["capacity"]

    def simulate(self, fleet, trace, flags):
        workers, profile = fleet.split(" × ")
        file, _, block = TRACES[trace]
        command = [self.options.binary, "simulate", "--json", f"--trace={self.options.traces / file}"]
        command += [f"--workers={workers}", f"--profile={profile}", f"--block-size={block}", *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{command}: {done.stderr}")
        return json.loads(done.stdout)

    def keep(self, cell, figures):
        self.found[cell] = figures
        with self.options.results.open("a") as file:
            file.write(json.dumps({"cell": cell, "figures": figures}) + "\n")

    def seeds(self, name, fleet, trace, load):
        """Seeds that both the candidate and the base have."""
        has = lambda seed, name: (fleet, trace, load, seed, name) in self.found
        return [seed for seed in range(1, self.options.seeds + 1) if has(seed, name) and has(seed, BASE)]

    def ratio(self, name, metric, places):
        """Geometric mean over the places of the ratio to the base, and the factor of its 95 % interval."""
        shared = [set(self.seeds(name, *place)) for place in places]
        seeds = set.intersection(*shared) if shared else set()
        log = lambda place, seed: math.log(
            self.found[(*place, seed, name)][metric] / self.found[(*place, seed, BASE)][metric]
        )
        means = [statistics.mean(log(place, seed) for place in places) for seed in sorted(seeds)]
        if not means:
            return None
        spread = statistics.stdev(means) / math.sqrt(len(means)) if len(means) >= SEEDS_MIN else math.nan
        return math.exp(statistics.mean(means)), math.exp(STUDENT[min(len(means) - 1, 9)] * spread)

    def mean(self, name, metric, place):
        return statistics.mean(self.found[(*place, seed, name)][metric] for seed in self.seeds(name, *place))


def places(fleets):
    return [(fleet, trace, load) for fleet in fleets for trace in TRACES for load in sorted(LOADS)]


def shown(ratio):
    if ratio is None or math.isnan(ratio[1]):
        return "–" if ratio is None else f"{ratio[0]:.2f}"
    return f"{ratio[0]:.2f} ± {ratio[0] * (ratio[1] - 1):.2f}"


def heads(*names):
    return [list(names), ["---"] * len(names)]


def summary(sweep):
    """Geometric means over the loads of the first fleet."""
    first = places(FLEETS[:1])
    of = lambda trace: [place for place in first if place[1] == trace]
    rows = heads("policy", *TRACES, *METRICS.values())
    rows.append([BASE, *(["1"] * (len(rows[0]) - 1))])
    for name in [name for name in POLICIES if name != BASE]:
        traces = [trace for trace in TRACES if name != "session" or trace in SESSION_TRACES]
        ratios = [shown(sweep.ratio(name, "ttft_mean_ms", of(t))) if t in traces else "–" for t in TRACES]
        whole = [shown(sweep.ratio(name, metric, first)) if len(traces) == len(TRACES) else "–" for metric in METRICS]
        rows.append([name, *ratios, *whole])
    return rows


def weights(sweep):
    """Geometric means over all fleets and loads."""
    rows = heads("policy", *TRACES, *METRICS.values())
    of = lambda trace: [place for place in places(FLEETS) if place[1] == trace]
    for name in WEIGHTS:
        ratios = [shown(sweep.ratio(name, "ttft_mean_ms", of(trace))) for trace in TRACES]
        rows.append([name, *ratios, *(shown(sweep.ratio(name, metric, places(FLEETS))) for metric in METRICS)])
    return rows


def fleets(sweep):
    """Weight 1 by fleet and load."""
    rows = heads("fleet", "load", *TRACES, *METRICS.values())
    for fleet, load in itertools.product(FLEETS, sorted(LOADS)):
        here = [(fleet, trace, load) for trace in TRACES]
        ratios = [shown(sweep.ratio(CARD, "ttft_mean_ms", [place])) for place in here]
        whole = [shown(sweep.ratio(CARD, metric, here)) for metric in METRICS]
        rows.append([fleet, f"{load:.0%}", *ratios, *whole])
    return rows


def unequal(sweep):
    rows = heads("fleet", "policy", *TRACES, *METRICS.values())
    for (fleet, load), name in itertools.product(unequal_fleets(), WEIGHTS):
        here = [(fleet, trace, load) for trace in TRACES]
        ratios = [shown(sweep.ratio(name, "ttft_mean_ms", [place])) for place in here]
        whole = [shown(sweep.ratio(name, metric, here)) for metric in METRICS]
        rows.append([f"{fleet.partition(', ')[2]}, {load:.0%} load", name, *ratios, *whole])
    return rows


def cells_of_first(sweep):
    others = [name for name in POLICIES if name != BASE]
    rows = heads("trace", "load", f"{BASE}: TTFT", "hits", *others)
    for place in places(FLEETS[:1]):
        _, trace, load = place
        ttft, hits = sweep.mean(BASE, "ttft_mean_ms", place), sweep.mean(BASE, "hit_rate", place)
        ratios = [shown(sweep.ratio(name, "ttft_mean_ms", [place])) for name in others]
        rows.append([trace, f"{load:.0%}", f"{ttft:.0f} ms", f"{hits:.0%}", *ratios])
    return rows


def routers(sweep):
    rows = heads("trace", *(f"{name}: {what}" for name in ROUTERS for what in ("mean TTFT", "p99 TTFT")))
    for trace in TRACES:
        place = (FLEETS[0], trace, LOADS[0])
        ratios = [sweep.ratio(name, metric, [place]) for name in ROUTERS for metric in ("ttft_mean_ms", "ttft_p99_ms")]
        rows.append([trace, *map(shown, ratios)])
    return rows


def print_worse(sweep):
    """The places at which weight 1 is better by more than the target allows, with 95 % confidence."""
    for (metric, margin), place in itertools.product(MARGINS.items(), places(FLEETS)):
        ratio = sweep.ratio(CARD, metric, [place])
        if ratio is None or math.isnan(ratio[1]):
            raise SystemExit(f"too few seeds of {place}")
        if ratio[0] * ratio[1] * margin < 1:
            print(f"{METRICS[metric]} of {place}: {1 / ratio[0]:.2f}, {1 / ratio[0] / ratio[1]:.2f} at least")


def plot(sweep):
    """Bars of the mean TTFT against the base, one panel a trace, on a logarithmic axis."""
    width, row, left, top = 900, 14, 100, 40
    panel = (width - left) / len(TRACES)
    reach = math.log(90)
    first = places(FLEETS[:1])
    height = top + row * len(POLICIES) + 28
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">']
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    parts.append(f'<text x="{left}" y="14">Mean time to first token over that of {BASE}; {FLEETS[0]}, loads of 50 to 95%</text>')
    for at, name in enumerate(POLICIES):
        parts.append(f'<text x="{left - 6}" y="{top + row * at + 10}" text-anchor="end">{name}</text>')
    for number, trace in enumerate(TRACES):
        x = left + number * panel
        parts.append(f'<text x="{x:.1f}" y="{top - 8}" font-weight="bold">{trace}</text>')
        scale = lambda value: max(0.0, min(1.0, (math.log(value) + math.log(1.2)) / reach)) * (panel - 20)
        for tick in (1, 2, 4, 8, 16, 32, 64):
            at = x + scale(tick)
            parts.append(f'<path d="M{at:.1f} {top}V{height - 24}" stroke="#ddd"/>')
            parts.append(f'<text x="{at:.1f}" y="{height - 10}" text-anchor="middle" fill="#555">{tick}</text>')
        for at, name in enumerate(POLICIES):
            ratio = sweep.ratio(name, "ttft_mean_ms", [place for place in first if place[1] == trace])
            if ratio is None:
                continue
            middle, y = scale(ratio[0]), top + row * at
            colour = "#2a7" if name == BASE else "#48c"
            parts.append(f'<rect x="{x:.1f}" y="{y + 2}" width="{middle:.1f}" height="{row - 4}" fill="{colour}"/>')
            factor = 1.0 if math.isnan(ratio[1]) else ratio[1]
            ends = scale(ratio[0] / factor), scale(ratio[0] * factor)
            parts.append(f'<path d="M{x + ends[0]:.1f} {y + row / 2}H{x + ends[1]:.1f}" stroke="#222"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def write_between(page, name, rows):
    """Replaces the table after the comment with this name."""
    text = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    begin, end = f"<!-- table: {name} -->\n", "<!-- end -->"
    before, _, rest = page.partition(begin)
    return before + begin + text + "\n" + rest[rest.index(end) :]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=pathlib.Path, required=True)
    parser.add_argument("--binary", default=str(ROOT / "target/release/warmroute-router"))
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "target/quality.jsonl")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--write-only", action="store_true", help="write the tables of what was run")
    options = parser.parse_args()
    sweep = Sweep(options)
    if not options.write_only:
        sweep.run()
    page = PAGE.read_text()
    for table in (summary, weights, routers):
        page = write_between(page, table.__name__, table(sweep))
    for table in (fleets, unequal, cells_of_first):
        print(*(" | ".join(row) for row in table(sweep)), sep="\n")
    PAGE.write_text(page)
    (HERE / "policies.svg").write_text(plot(sweep))
    print_worse(sweep)


if __name__ == "__main__":
    main()
