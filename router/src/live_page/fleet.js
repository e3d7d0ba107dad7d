// The table of all sources: one row a rank, updated in place.

import * as dom from "./dom.js";
import { byId, count, duration, element, keyed, setAttribute, setText, shortened } from "./dom.js";

// Further rows are shown on request.
const ROWS_MAX = 500;

const collator = new Intl.Collator("en", { numeric: true });
const word = (state) => state.replaceAll("_", " ");

const STATE_LEVEL = { exact: "good", partial: "good", unverified: "warn", stale: "warn" };
const stateLevel = (state) => STATE_LEVEL[state] ?? "off";
const STATE_ORDER = ["exact", "partial", "unverified", "stale", "catching_up", "unknown", "absent"];
// A tier that the engine does not have.
const shown = (state) => (state === "absent" ? dom.NONE : word(state));

const tier = (name, label) => ({
  label,
  text: (row) => (row.is_without_events ? "no events" : shown(row.tiers?.[name] ?? "unknown")),
  sort: (row) => STATE_ORDER.indexOf(row.tiers?.[name] ?? "unknown"),
  level: (row) => stateLevel(row.tiers?.[name]),
});

const figure = (label, unit, field, format = count) => ({
  label,
  unit,
  text: (row) => format(row[field]),
  sort: (row) => row[field] ?? -1,
  isNumber: true,
});

// Faults beside the health, in a few words.
function faults(row) {
  const found = [];
  if (!row.registered) found.push("not registered");
  if (row.is_stalled) found.push("stalled");
  if (row.is_demoted) found.push("no credit: contradicted");
  if (row.failed_checks.length) found.push(`check failed: ${row.failed_checks.join(", ")}`);
  return found;
}

const healthLevel = (row) => {
  if (row.health === "unhealthy") return "bad";
  return faults(row).length || row.health !== "healthy" ? "warn" : "good";
};

const COLUMNS = [
  {
    label: "Worker",
    text: (row) =>
      row.role === "both" ? shortened(row.worker) : `${shortened(row.worker)} (${row.role})`,
    whole: (row) => row.worker,
    sort: (row) => row.worker,
    title: (row) => `${row.worker}, ${row.url}`,
  },
  { label: "Rank", text: (row) => String(row.rank), sort: (row) => row.rank, isNumber: true },
  { label: "Model", text: (row) => row.models.join(", ") || dom.NONE, isNarrow: true },
  {
    label: "Health",
    text: (row) => [row.health, ...faults(row)].join(" · "),
    sort: (row) => ["bad", "warn", "good"].indexOf(healthLevel(row)),
    level: healthLevel,
  },
  { label: "Drain", text: (row) => row.drain, level: (row) => (row.drain === "draining" ? "warn" : null) },
  {
    label: "Breaker",
    text: (row) => word(row.breaker),
    level: (row) => ({ half_open: "warn", resting: "warn", open: "bad" })[row.breaker] ?? null,
  },
  tier("gpu", "GPU"),
  tier("cpu", "CPU"),
  tier("disk", "Disk"),
  figure("Cached", "blocks", "cached_blocks"),
  {
    label: "Active",
    unit: "requests",
    text: ({ active_requests: own, foreign_requests: foreign }) =>
      foreign ? `${count(own)} + ${count(foreign)}` : count(own),
    title: (row) => (row.foreign_requests ? "of the routers + from elsewhere" : null),
    sort: (row) => row.active_requests + row.foreign_requests,
    isNumber: true,
  },
  figure("Prefill", "tokens", "prefill_tokens"),
  figure("Decode", "blocks", "decode_blocks"),
  figure("TTFT", "average", "ttft_ms", duration),
];
COLUMNS.forEach((column) => {
  column.sort ??= column.text;
  column.whole ??= column.text;
});

const hasProblem = (row) =>
  healthLevel(row) !== "good" ||
  row.drain !== "serving" ||
  row.breaker !== "closed" ||
  (!row.is_without_events && stateLevel(row.tiers?.gpu) !== "good");

const compare = (one, other) =>
  typeof one === "number" ? one - other : collator.compare(one, other);

export class FleetTable {
  constructor() {
    this.rows = [];
    this.kept = new Map();
    this.sorted = { column: COLUMNS[0], sign: 1 };
    this.rowsMax = ROWS_MAX;
    this.heads = COLUMNS.map((column) => this.head(column));
    byId("sources").tHead.rows[0].append(...this.heads);
    byId("filter").addEventListener("input", () => this.draw());
    byId("problems").addEventListener("change", () => this.draw());
    byId("fleet-more").addEventListener("click", () => {
      this.rowsMax = Infinity;
      this.draw();
    });
  }

  head(column) {
    const label = element("button", { type: "button" }, column.label);
    if (column.unit) label.append(" ", element("small", {}, column.unit));
    label.addEventListener("click", () => {
      const isSame = this.sorted.column === column;
      this.sorted = { column, sign: isSame ? -this.sorted.sign : column.isNumber ? -1 : 1 };
      this.draw();
    });
    const head = element("th", { scope: "col", "aria-sort": "none" }, label);
    if (column.isNumber) head.className = "number";
    return head;
  }

  show(workers) {
    this.rows = workers.flatMap(({ ranks, ...worker }) =>
      ranks.map((rank) => ({ ...worker, ...rank })),
    );
    this.draw();
  }

  draw() {
    const wanted = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const onlyProblems = byId("problems").checked;
    const { column, sign } = this.sorted;
    const chosen = this.rows.filter((row) => {
      if (onlyProblems && !hasProblem(row)) return false;
      if (!wanted.length) return true;
      const text = COLUMNS.map((one) => one.whole(row)).join(" ").toLowerCase();
      return wanted.every((part) => text.includes(part));
    });
    chosen.sort(
      (a, b) =>
        sign * compare(column.sort(a), column.sort(b)) ||
        collator.compare(a.worker, b.worker) ||
        a.rank - b.rank,
    );
    const shown = chosen.slice(0, this.rowsMax);
    const body = byId("sources").tBodies[0];
    const key = (row) => `${row.rank} ${row.worker}`;
    keyed(body, this.kept, shown, key, makeRow, updateRow);
    this.heads.forEach((head, at) => {
      const order = sign > 0 ? "ascending" : "descending";
      setAttribute(head, "aria-sort", COLUMNS[at] === column ? order : "none");
    });
    const all = this.rows.length;
    const unit = this.rows.some((row) => row.rank > 0) ? "ranks" : "workers";
    const part = shown.length < all ? `${count(shown.length)} of ${count(all)}` : count(all);
    setText(byId("fleet-count"), `${part} ${unit}`);
    byId("fleet-more").hidden = shown.length === chosen.length;
  }
}

function makeRow() {
  const row = element("tr");
  COLUMNS.forEach((column, at) => {
    const cell = at === 0 ? element("th", { scope: "row" }) : element("td");
    if (column.isNumber) cell.className = "number";
    if (column.isNarrow) cell.className = "narrow";
    cell.append(element("span"));
    row.append(cell);
  });
  return row;
}

function updateRow(tr, row) {
  COLUMNS.forEach((column, at) => {
    const cell = tr.cells[at];
    const text = column.text(row);
    setText(cell.firstChild, text);
    if (column.level) setAttribute(cell.firstChild, "data-level", column.level(row));
    const title = column.title ? column.title(row) : column.isNarrow ? text : null;
    setAttribute(cell, "title", title);
  });
}

// A small table whose rows have a key.
export class SmallTable {
  constructor(id, columns) {
    this.columns = columns;
    this.kept = new Map();
    const heads = columns.map(({ label, unit, isNumber }) => {
      const head = element("th", { scope: "col" }, label);
      if (unit) head.append(" ", element("small", {}, unit));
      if (isNumber) head.className = "number";
      return head;
    });
    this.body = byId(id).tBodies[0];
    byId(id).tHead.rows[0].append(...heads);
  }

  show(rows, key) {
    const make = () => {
      const cells = this.columns.map(({ isNumber }, at) => {
        const cell = at === 0 ? element("th", { scope: "row" }) : element("td");
        if (isNumber) cell.className = "number";
        cell.append(element("span"));
        return cell;
      });
      return element("tr", {}, ...cells);
    };
    keyed(this.body, this.kept, rows, key, make, (tr, row) => {
      this.columns.forEach((column, at) => {
        const inner = tr.cells[at].firstChild;
        setText(inner, column.text(row));
        if (column.level) setAttribute(inner, "data-level", column.level(row));
      });
    });
  }
}
