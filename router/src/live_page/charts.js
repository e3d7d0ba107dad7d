// Small line charts of the last five minutes.

import { byId, element, estimate, NONE, setText, timeOfDay } from "./dom.js";

export const SPAN_MS = 300_000;
const GRID_LINES = 4;
const MARGIN = { left: 0, right: 4, top: 20, bottom: 20 };
const SVG = "http://www.w3.org/2000/svg";

const svgElement = (name, attributes = {}) => {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
};

// The least of 1, 2, 5 times a power of ten that is not below the value.
function niceMax(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

export class Chart {
  // `series`: names and functions from a point to a value or null. `most`: the fixed upper end, or
  // null for one that fits.
  constructor(figure, { series, format, most }) {
    Object.assign(this, { series, format, most, points: [], chosen: null });
    this.legend = element("figcaption", { class: "legend" });
    this.values = series.map(({ name }, index) => {
      const value = element("b", {}, NONE);
      this.legend.append(element("span", { class: `key series-${index}` }, `${name} `, value));
      return value;
    });
    this.moment = element("span", { class: "muted" });
    this.legend.append(this.moment);
    this.svg = svgElement("svg", { role: "img" });
    this.grid = svgElement("g", { class: "grid" });
    this.labels = svgElement("g", { class: "labels" });
    this.cursor = svgElement("line", { class: "cursor", visibility: "hidden" });
    this.lines = series.map((_, index) => svgElement("path", { class: `line series-${index}` }));
    this.svg.append(this.grid, ...this.lines, this.cursor, this.labels);
    figure.append(this.legend, this.svg);
    new ResizeObserver(() => this.draw()).observe(this.svg);
    this.svg.addEventListener("pointermove", (event) => this.choose(event));
    this.svg.addEventListener("pointerleave", () => this.choose(null));
  }

  show(points) {
    this.points = points;
    this.draw();
  }

  choose(event) {
    this.chosen = event && event.clientX - this.svg.getBoundingClientRect().left;
    this.draw();
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.svg;
    if (!width || !this.points.length) return;
    const values = this.series.map(({ of }) => this.points.map(of));
    const highest = Math.max(0, ...values.flat().filter((value) => value !== null));
    const top = this.most ?? niceMax(Math.max(highest, 1));
    const now = this.points.at(-1).unix_ms;
    const x = (unixMs) =>
      MARGIN.left + (1 - (now - unixMs) / SPAN_MS) * (width - MARGIN.left - MARGIN.right);
    const y = (value) =>
      height - MARGIN.bottom - (value / top) * (height - MARGIN.top - MARGIN.bottom);
    this.drawGrid(width, height, top, x, y);
    values.forEach((of, index) => {
      const path = of.map((value, at) => {
        if (value === null) return "";
        const begins = at === 0 || of[at - 1] === null;
        const place = `${x(this.points[at].unix_ms).toFixed(1)} ${y(value).toFixed(1)}`;
        return begins ? `M${place}h.1` : `L${place}`;
      });
      this.lines[index].setAttribute("d", path.join(""));
    });
    this.drawLegend(values, x, height);
  }

  drawGrid(width, height, top, x, y) {
    const key = `${width} ${height} ${top}`;
    if (key === this.drawn) return;
    this.drawn = key;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.grid.replaceChildren();
    this.labels.replaceChildren();
    for (let step = 0; step <= GRID_LINES; step += 1) {
      const value = (top * step) / GRID_LINES;
      const line = { x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) };
      this.grid.append(svgElement("line", line));
      if (step % 2 === 0 && step > 0) this.label(this.format(value), MARGIN.left, y(value) - 4, "start");
    }
    const last = this.points.at(-1).unix_ms;
    for (const minutes of width < 400 ? [5, 3, 1, 0] : [5, 4, 3, 2, 1, 0]) {
      const at = x(last - minutes * 60_000);
      const anchor = { 5: "start", 0: "end" }[minutes] ?? "middle";
      this.label(minutes ? `−${minutes} min` : "now", at, height - 4, anchor);
    }
  }

  label(text, x, y, anchor) {
    const label = svgElement("text", { x, y, "text-anchor": anchor });
    label.textContent = text;
    this.labels.append(label);
  }

  // The values under the pointer, else the newest.
  drawLegend(values, x, height) {
    let at = this.points.length - 1;
    if (this.chosen !== null) {
      const near = (index) => Math.abs(x(this.points[index].unix_ms) - this.chosen);
      at = values[0].reduce((best, _, index) => (near(index) < near(best) ? index : best), 0);
      const place = x(this.points[at].unix_ms);
      const line = { x1: place, x2: place, y1: MARGIN.top, y2: height - MARGIN.bottom };
      Object.entries(line).forEach(([key, value]) => this.cursor.setAttribute(key, value));
    }
    this.cursor.setAttribute("visibility", this.chosen === null ? "hidden" : "visible");
    const shown = values.map((of) => (of[at] === null ? NONE : this.format(of[at])));
    shown.forEach((text, index) => setText(this.values[index], text));
    setText(this.moment, this.chosen === null ? "" : timeOfDay(this.points[at].unix_ms));
    const named = this.series.map(({ name }, index) => `${name} ${shown[index]}`);
    this.svg.setAttribute("aria-label", `Last five minutes; now ${named.join(", ")}`);
  }
}

// Shares of sums over the ten seconds before each point.
function share(points, part, whole) {
  const window = [];
  const sums = { part: 0, whole: 0 };
  return points.map((point) => {
    window.push(point);
    sums.part += part(point);
    sums.whole += whole(point);
    while (point.unix_ms - window[0].unix_ms >= 10_000) {
      const old = window.shift();
      sums.part -= part(old);
      sums.whole -= whole(old);
    }
    return sums.whole > 0 ? sums.part / sums.whole : null;
  });
}

export function addHitRates(points) {
  const credited = share(points, (p) => p.credited_tokens, (p) => p.prompt_tokens);
  const reported = share(
    points,
    (p) => p.reported_cached_tokens,
    (p) => p.reported_prompt_tokens,
  );
  return points.map((point, at) => ({
    ...point,
    credited_share: credited[at],
    reported_share: reported[at],
  }));
}

export const hitChart = () =>
  new Chart(byId("hits"), {
    series: [
      { name: "credited by the index", of: (point) => point.credited_share },
      { name: "reported by engines", of: (point) => point.reported_share },
    ],
    format: (value) => `${Math.round(100 * value)} %`,
    most: 1,
  });

export const ttftChart = () =>
  new Chart(byId("ttft"), {
    series: [
      { name: "p50", of: (point) => point.ttft_p50_ms },
      { name: "p95", of: (point) => point.ttft_p95_ms },
    ],
    format: estimate,
    most: null,
  });
