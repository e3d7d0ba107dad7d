#!/usr/bin/env python3
"""Draws lookup time against prompt length and against entries.

usage: plot.py OUT.svg < lines   (lines: output of `--child lengths`, one per variant and file)
"""
import json
import math
import sys

COLOURS = {"warmroute": "#0a7d4b", "peer: concurrent tree": "#b3423a"}
WIDTH, HEIGHT, LEFT, TOP = 380, 260, 60, 40


def panel(at, title, unit, series):
    """One log-log panel. series: name -> [(x, nanoseconds)]."""
    points = [point for line in series.values() for point in line]
    low = [math.log10(min(point[axis] for point in points)) for axis in (0, 1)]
    high = [math.log10(max(point[axis] for point in points)) for axis in (0, 1)]
    low[1], high[1] = math.floor(low[1]), math.ceil(high[1])

    def place(x, y):
        across = (math.log10(x) - low[0]) / (high[0] - low[0])
        up = (math.log10(y) - low[1]) / (high[1] - low[1])
        return at + LEFT + across * WIDTH, TOP + HEIGHT * (1 - up)

    out = [f'<text x="{at + LEFT}" y="24" font-size="14">{title}</text>']
    out.append(f'<rect x="{at + LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#888"/>')
    for power in range(low[1], high[1] + 1):
        _, y = place(10 ** low[0], 10 ** power)
        label = f"{10 ** power / 1000:g} µs"
        out.append(f'<line x1="{at + LEFT}" x2="{at + LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{at + LEFT - 6}" y="{y + 4:.1f}" font-size="11" text-anchor="end">{label}</text>')
    for x in sorted({point[0] for point in max(series.values(), key=len)})[::2]:
        across, _ = place(x, 10 ** low[1])
        label = f"{x / 1e6:.1f} M" if x >= 1e6 else f"{x}"
        out.append(f'<text x="{across:.1f}" y="{TOP + HEIGHT + 16}" font-size="11" text-anchor="middle">{label}</text>')
    out.append(f'<text x="{at + LEFT + WIDTH / 2}" y="{TOP + HEIGHT + 34}" font-size="12" text-anchor="middle">{unit}</text>')
    for row, (name, line) in enumerate(sorted(series.items())):
        colour = COLOURS.get(name, "#555")
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in sorted(line)))
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y in (place(*point) for point in line):
            out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
        y = TOP + 16 + 16 * row
        out.append(f'<text x="{at + LEFT + 8}" y="{y}" font-size="12" fill="{colour}">{name}</text>')
    return out


def main():
    lines = [json.loads(line) for line in sys.stdin if line.strip()]
    smallest = min(line["entries"] for line in lines)
    lengths, entries = {}, {}
    for line in lines:
        if line["entries"] == smallest:
            lengths[line["variant"]] = line["lengths"]
        longest = max(line["lengths"], key=lambda point: point[0])
        entries.setdefault(line["variant"], []).append((line["entries"], longest[1]))
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * (WIDTH + LEFT) + 40}" height="{HEIGHT + TOP + 50}" font-family="sans-serif">']
    out.append('<rect width="100%" height="100%" fill="white"/>')
    out += panel(0, "Median lookup by prompt length", "blocks of 16 tokens", lengths)
    out += panel(WIDTH + LEFT + 20, "Median lookup of the longest prompts by size", "(worker, block) entries", entries)
    out.append("</svg>")
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        file.write("\n".join(out) + "\n")


main()
