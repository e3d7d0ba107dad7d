#!/usr/bin/env python3
"""Draws CPU seconds per 1,000 requests by load and proxy, from the tables of the benchmark.

usage: plot.py OUT.svg [FILE...]   (without files: standard input; docs/PERF.md is a file, too)
"""
import fileinput
import math
import sys

COLUMNS = ["load", "proxy", "CPU s / 1,000"]
# Readable on white and on black; ours stands out.
COLOURS = ["#8a8f98", "#b9770e", "#c05a9d", "#5b7fd6", "#2f9fb3", "#b3564a", "#8f6bd1", "#6f8f2f"]
OURS = "#17a05d"
WIDTH, HEIGHT, LEFT, TOP, KEY = 860, 300, 64, 36, 210
STYLE = """
.page { fill: #ffffff; }
text { fill: #24292f; }
.grid { stroke: #8a8f98; stroke-opacity: 0.35; }
@media (prefers-color-scheme: dark) { .page { fill: #0d1117; } text { fill: #e6edf3; } }
"""


def cells(lines):
    """(load, proxy) -> seconds, in the tables' order; a later table replaces an earlier cell."""
    found, is_table = {}, False
    for line in lines:
        if not line.startswith("|"):
            is_table = False
            continue
        fields = [field.strip() for field in line.strip().strip("|").split("|")]
        if fields[:3] == COLUMNS:
            is_table = True
        elif is_table and not set(fields[0]) <= set("-:"):
            load, proxy, seconds = fields[:3]
            # Direct connections have no proxy that takes time.
            if proxy != "direct":
                found[load, proxy] = float(seconds)
    return found


def text(x, y, anchor, size, content):
    escaped = content.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escaped}</text>'


def grid(low, high, place):
    """Lines and labels of 1, 2 and 5 times each power of ten."""
    out = []
    for power in range(math.floor(low), math.ceil(high) + 1):
        for step in (1, 2, 5):
            value = step * 10.0 ** power
            if not low <= math.log10(value) <= high:
                continue
            y = place(value)
            out.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
            out.append(text(LEFT - 6, y + 4, "end", 11, f"{value:g} s"))
    return out


def chart(found):
    loads = list(dict.fromkeys(load for load, _ in found))
    proxies = list(dict.fromkeys(proxy for _, proxy in found))
    others = iter(COLOURS * len(proxies))
    colours = {name: OURS if name.startswith("warmroute") else next(others) for name in proxies}
    positive = [seconds for seconds in found.values() if seconds > 0]
    low, high = math.log10(min(positive) / 1.6), math.log10(max(positive) * 1.3)

    def place(seconds):
        up = (math.log10(max(seconds, 10 ** low)) - low) / (high - low)
        return TOP + HEIGHT * (1 - up)

    out = [text(LEFT, 20, "start", 14, "CPU seconds per 1,000 requests (logarithmic; less is better)")]
    out += grid(low, high, place)
    group = WIDTH / len(loads)
    bar = group * 0.86 / len(proxies)
    for at, load in enumerate(loads):
        start = LEFT + group * (at + 0.07)
        for number, proxy in enumerate(proxies):
            if (load, proxy) not in found:
                continue
            seconds = found[load, proxy]
            x, y = start + bar * number, place(seconds)
            out.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{bar * 0.88:.1f}"'
                f' height="{TOP + HEIGHT - y:.1f}" fill="{colours[proxy]}">'
                f"<title>{proxy}, {load}: {seconds:g} s</title></rect>"
            )
            out.append(text(x + bar * 0.44, y - 3, "middle", 8, f"{seconds:.2g}"))
        out.append(text(start + group * 0.43, TOP + HEIGHT + 18, "middle", 12, load))
    for row, proxy in enumerate(proxies):
        y = TOP + 8 + 20 * row
        out.append(f'<rect x="{LEFT + WIDTH + 16}" y="{y}" width="12" height="12" fill="{colours[proxy]}"/>')
        out.append(text(LEFT + WIDTH + 34, y + 10, "start", 12, proxy))
    return out


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__.strip())
    lines = fileinput.input(sys.argv[2:], openhook=fileinput.hook_encoded("utf-8"))
    found = cells(lines)
    if not found:
        sys.exit("no table with the columns " + ", ".join(COLUMNS))
    size = f'width="{LEFT + WIDTH + KEY}" height="{TOP + HEIGHT + 32}"'
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">']
    out += [f"<style>{STYLE}</style>", '<rect class="page" width="100%" height="100%"/>']
    out += [*chart(found), "</svg>"]
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        file.write("\n".join(out) + "\n")


main()
