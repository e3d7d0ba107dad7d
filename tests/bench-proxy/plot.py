#!/usr/bin/env python3
"""Draws CPU seconds per 1,000 requests by load and proxy, from the tables of the benchmark.

usage: plot.py OUT.svg [FILE...]   (without files: standard input; README.md here is a file, too)
"""
import fileinput
import itertools
import math
import sys

COLUMNS = ["load", "proxy", "CPU s / 1,000"]
# Ours are greens; of two policies of a router the second is darker.
COLOURS = {
    "nginx": "#8a8f98",
    "HAProxy": "#d9a441",
    "warmroute round-robin": "#17a05d",
    "warmroute, default policy": "#0b7a43",
    "warmroute over NATS": "#7fd0a5",
    "vllm-router round_robin": "#9db8ee",
    "vllm-router cache_aware": "#4a6fc9",
    "sglang-router round_robin": "#e3a59c",
    "sglang-router cache_aware": "#b3564a",
}
OTHER_COLOURS = ["#8f6bd1", "#c05a9d", "#6f8f2f", "#2f9fb3"]
WIDTH, HEIGHT, LEFT, TOP, BELOW, KEY = 860, 230, 64, 40, 44, 210


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


def escaped(content):
    return content.replace("&", "&amp;").replace("<", "&lt;")


def text(x, y, anchor, size, content):
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {place} fill="#24292f">{escaped(content)}</text>'


def panels(found):
    """Loads that the same proxies have, as (loads, proxies)."""
    proxies_of = {}
    for load, proxy in found:
        proxies_of.setdefault(load, []).append(proxy)
    loads_of = {}
    for load, proxies in proxies_of.items():
        loads_of.setdefault(frozenset(proxies), []).append(load)
    return [(loads, proxies_of[loads[0]]) for loads in loads_of.values()]


def colours(found):
    others = itertools.cycle(OTHER_COLOURS)
    proxies = dict.fromkeys(proxy for _, proxy in found)
    return {proxy: COLOURS.get(proxy) or next(others) for proxy in proxies}


class Scale:
    """Places of seconds on a logarithmic axis, from the axis's foot in pixels."""

    def __init__(self, found):
        positive = [seconds for seconds in found.values() if seconds > 0]
        self.low = math.log10(min(positive) / 1.6)
        self.high = math.log10(max(positive) * 1.3)

    def up(self, seconds):
        above = math.log10(max(seconds, 10 ** self.low)) - self.low
        return HEIGHT * above / (self.high - self.low)

    def marks(self):
        """1, 2 and 5 times each power of ten."""
        for power in range(math.floor(self.low), math.ceil(self.high) + 1):
            for step in (1, 2, 5):
                if self.low <= math.log10(step) + power <= self.high:
                    yield step * 10.0 ** power


def panel(found, loads, proxies, scale, foot):
    """One row of grouped bars, with its axis and key. `foot`: of the bars."""
    colour = colours(found)
    out = []
    for value in scale.marks():
        y = foot - scale.up(value)
        out.append(f'<line stroke="#ddd" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(text(LEFT - 6, y + 4, "end", 11, f"{value:g} s"))
    group = WIDTH / len(loads)
    bar = group * 0.86 / len(proxies)
    for at, load in enumerate(loads):
        start = LEFT + group * (at + 0.07)
        for number, proxy in enumerate(proxies):
            seconds = found[load, proxy]
            x, up = start + bar * number, scale.up(seconds)
            out.append(
                f'<rect x="{x:.1f}" y="{foot - up:.1f}" width="{bar * 0.88:.1f}"'
                f' height="{up:.1f}" fill="{colour[proxy]}">'
                f"<title>{escaped(f'{proxy}, {load}: {seconds:g} s')}</title></rect>"
            )
            out.append(text(x + bar * 0.44, foot - up - 3, "middle", 9, f"{seconds:.2g}"))
        out.append(text(start + group * 0.43, foot + 18, "middle", 12, load))
    for row, proxy in enumerate(proxies):
        y = foot - HEIGHT + 8 + 20 * row
        out.append(f'<rect x="{LEFT + WIDTH + 16}" y="{y}" width="12" height="12" fill="{colour[proxy]}"/>')
        out.append(text(LEFT + WIDTH + 34, y + 10, "start", 12, proxy))
    return out


def chart(found):
    """The elements, and the height in pixels."""
    scale, foot = Scale(found), TOP - BELOW
    out = [text(LEFT, 20, "start", 14, "CPU seconds per 1,000 requests (logarithmic; less is better)")]
    for loads, proxies in panels(found):
        foot += BELOW + HEIGHT
        out += panel(found, loads, proxies, scale, foot)
    return out, foot + BELOW


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__.strip())
    lines = fileinput.input(sys.argv[2:], openhook=fileinput.hook_encoded("utf-8"))
    found = cells(lines)
    if not found:
        sys.exit("no table with the columns " + ", ".join(COLUMNS))
    elements, height = chart(found)
    size = f'width="{LEFT + WIDTH + KEY}" height="{height}"'
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">']
    out += ['<rect width="100%" height="100%" fill="white"/>', *elements, "</svg>"]
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        file.write("\n".join(out) + "\n")


main()
