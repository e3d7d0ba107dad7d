// Reads the router's stream of states and shows each.

import { addHitRates, hitChart, SPAN_MS, ttftChart } from "./charts.js";
import { DecisionList } from "./decisions.js";
import { byId, count, duration, element, estimate, keyed, NONE, number, percent, plural, setAttribute, setText, shortened, timeOfDay } from "./dom.js";
import { FleetTable, SmallTable } from "./fleet.js";

const KEY = "warmroute-admin-key";
const CHANGES = "warmroute-changes";
const RETRY_MS = 2_000;
// Without a state for so long, the connection is taken to be lost.
const SILENT_MS = 8_000;
const CHANGES_MAX = 50;
// More changes of one second are announced as a number.
const ANNOUNCED_MAX = 3;

const RUNGS = [
  ["exact", "proven complete"],
  ["partial", "may hold more"],
  ["unverified", "losses not visible"],
  ["stale", "GPU tier stale"],
  ["catching_up", "GPU tier catching up"],
  ["unknown", "GPU tier unknown"],
  ["reported", "by the engine"],
  ["prediction", "requests on the way"],
  ["approximate", "earlier requests"],
  ["load_only", "no knowledge"],
];
const ALWAYS_SHOWN = ["exact", "partial", "unverified", "reported", "prediction", "approximate", "load_only"];

let points = [];
let known = null;
let isPaused = false;

const charts = [hitChart(), ttftChart()];
const fleet = new FleetTable();
const decisions = new DecisionList();

const routers = new SmallTable("routers", [
  { label: "Router", text: (one) => one.router.slice(0, 8) },
  {
    label: "View",
    text: (one) => ({ lacking: "fetching" })[one.standing] ?? one.standing,
    level: (one) => ({ following: "good", lacking: "warn" })[one.standing] ?? "bad",
  },
  {
    label: "Digest",
    text: (one) => (one.is_equal == null ? NONE : one.is_equal ? "equal" : "different"),
    level: (one) => (one.is_equal === false ? "bad" : null),
  },
  { label: "Active", unit: "requests", text: (one) => count(one.active_requests), isNumber: true },
  { label: "Apart", unit: "requests", text: (one) => count(one.divergence), isNumber: true },
  { label: "Silent", unit: "since", text: (one) => duration(one.silent_ms), isNumber: true },
]);

const indexers = new SmallTable("indexers", [
  { label: "Indexer", text: (one) => (one.id ? shortened(one.id) : "in this process") },
  { label: "State", text: indexerState, level: (one) => ({ ready: "good", "no answer": "bad" })[indexerState(one)] ?? "warn" },
  { label: "Behind", unit: "records", text: (one) => count(one.view?.lag_messages), isNumber: true },
  { label: "At the end", unit: "ago", text: (one) => duration(one.view?.lag_ms), isNumber: true },
  { label: "Version", text: (one) => one.view?.version ?? NONE },
]);

function indexerState({ view, is_suspect: isSuspect }) {
  if (!view) return "no answer";
  if (!view.ready) return "not ready";
  return isSuspect ? "late" : "ready";
}

// --- the stream

async function follow() {
  for (;;) {
    if (document.hidden) await shown();
    const began = Date.now();
    try {
      await readStream();
      // The router ends each stream after some minutes.
      if (Date.now() - began > SILENT_MS) continue;
    } catch (error) {
      if (!document.hidden) connection("bad", error.message || "no connection, reconnecting");
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

// A hidden page costs the router nothing.
const shown = () =>
  new Promise((resolve) => {
    const check = () => {
      if (document.hidden) return;
      document.removeEventListener("visibilitychange", check);
      resolve();
    };
    document.addEventListener("visibilitychange", check);
  });

async function open(signal) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = key ? { authorization: `Bearer ${key}` } : {};
    const answer = await fetch("live/events", { headers, signal, cache: "no-store" });
    if (answer.status === 401) await askForKey(key);
    else if (answer.ok) return answer;
    else throw new Error((await answer.json()).error);
  }
}

async function readStream() {
  const abort = new AbortController();
  const hide = () => document.hidden && abort.abort();
  document.addEventListener("visibilitychange", hide);
  let silence;
  const received = () => {
    clearTimeout(silence);
    silence = setTimeout(() => abort.abort(new Error("no connection, reconnecting")), SILENT_MS);
  };
  try {
    const answer = await open(abort.signal);
    received();
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      text += value;
      const events = text.split("\n\n");
      text = events.pop();
      for (const event of events) {
        received();
        take(event);
      }
    }
  } finally {
    clearTimeout(silence);
    document.removeEventListener("visibilitychange", hide);
  }
}

function take(event) {
  const [, name, data] = /^event: ([^\n]*)\ndata: ([^\n]*)$/.exec(event) ?? [];
  if (name === "history") points = JSON.parse(data);
  if (name !== "state") return;
  const state = JSON.parse(data);
  points.push(state.point);
  points = points.filter(({ unix_ms: at }) => state.point.unix_ms - at <= SPAN_MS);
  // An upgraded router may have another page.
  if (known && known.router.version !== state.router.version) location.reload();
  note(state);
  known = state;
  if (!isPaused) show(state);
  connection(isPaused ? "off" : "good", isPaused ? "paused" : "live");
}

function connection(level, text) {
  const badge = byId("connection");
  if (badge.textContent === text) return;
  setText(badge, text);
  setAttribute(badge, "data-level", level);
  if (level === "bad") announce([`Connection: ${text}`]);
}

function askForKey(wrongKey) {
  const dialog = byId("login");
  setText(byId("login-error"), wrongKey ? "The router does not accept this key." : "");
  sessionStorage.removeItem(KEY);
  byId("key").value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    const close = () => {
      if (!byId("key").value) {
        dialog.showModal();
        return;
      }
      dialog.removeEventListener("close", close);
      sessionStorage.setItem(KEY, byId("key").value);
      byId("key").value = "";
      resolve();
    };
    dialog.addEventListener("close", close);
  });
}

// --- changes that matter

function note(state) {
  if (!known) return;
  const before = new Map(known.workers.map((one) => [one.worker, one]));
  const found = [];
  for (const worker of state.workers) {
    const was = before.get(worker.worker);
    before.delete(worker.worker);
    if (!was) found.push(`${worker.worker} is new`);
    else {
      const changed = (field, text) => was[field] !== worker[field] && found.push(text);
      changed("health", `${worker.worker} is ${worker.health}`);
      changed("drain", `${worker.worker} is ${worker.drain}`);
      changed("breaker", `${worker.worker}: circuit breaker ${worker.breaker.replace("_", " ")}`);
    }
  }
  for (const worker of before.keys()) found.push(`${worker} is gone`);
  if (known.router.phase !== state.router.phase) found.push(`This router is ${state.router.phase}`);
  if (found.length) announce(found);
}

// As JSON in this tab, so that a reload of the page keeps them.
const changes = JSON.parse(sessionStorage.getItem(CHANGES) ?? "[]");

function announce(texts) {
  const many = texts.length > ANNOUNCED_MAX;
  setText(byId("announcements"), many ? `${texts.length} changes` : texts.join(". "));
  const time = timeOfDay(Date.now());
  changes.unshift(...texts.slice(0, CHANGES_MAX).map((text) => ({ time, text })));
  changes.splice(CHANGES_MAX);
  sessionStorage.setItem(CHANGES, JSON.stringify(changes));
  showChanges();
}

function showChanges() {
  if (!changes.length) return;
  const items = changes.map(({ time: at, text }) =>
    element("li", {}, element("time", { class: "muted" }, at), ` ${text}`),
  );
  byId("changes").replaceChildren(...items);
}

// --- the page

let shownFaults = "";

// What keeps the router from routing.
function showFaults(faults) {
  const text = faults.join("\n");
  if (text === shownFaults) return;
  shownFaults = text;
  const list = byId("faults");
  list.hidden = !faults.length;
  list.replaceChildren(...faults.map((fault) => element("li", {}, fault)));
}

const tiles = new Map();

function tile(label, value, remark, level = null) {
  if (!tiles.has(label)) {
    const made = { value: element("dd"), remark: element("dd", { class: "muted" }) };
    tiles.set(label, made);
    byId("tiles").append(element("div", { class: "card" }, element("dt", {}, label), made.value, made.remark));
  }
  const { value: main, remark: below } = tiles.get(label);
  setText(main, value);
  setAttribute(main, "data-level", level);
  setText(below, remark);
}

function showTiles(state, rated) {
  const { workers } = state;
  const total = (field) =>
    workers.reduce((sum, one) => sum + one.ranks.reduce((part, rank) => part + rank[field], 0), 0);
  const having = (field, value) => workers.filter((one) => one[field] === value).length;
  const healthy = having("health", "healthy");
  const parts = [
    [having("health", "unhealthy"), "unhealthy"],
    [having("health", "asleep"), "asleep"],
    [having("drain", "draining"), "draining"],
    [having("breaker", "open"), "with an open breaker"],
  ];
  const remarks = parts.filter(([some]) => some).map(([some, what]) => `${some} ${what}`);
  const level = !healthy ? "bad" : healthy < workers.length ? "warn" : null;
  tile("Healthy workers", `${count(healthy)} of ${count(workers.length)}`, remarks.join(", ") || (workers.length ? "none draining" : "no worker is known"), level);
  const sick = workers.length - healthy;
  document.title = sick ? `(${sick}) Warmroute` : "Warmroute";
  const waiting = state.router.waiting_requests;
  tile("Active requests", count(total("active_requests")), `${count(waiting)} waiting for a worker`, waiting ? "warn" : null);
  const longest = state.router.queues.reduce((most, one) => (one.requests > most.requests ? one : most), { requests: 0 });
  const queue = longest.requests ? `${longest.model}: oldest ${duration(longest.oldest_ms)}, ${number(longest.leaving_per_sec)} / s leave` : "no model's workers are full";
  tile("Queue", count(state.router.queued_requests), queue, longest.requests ? "warn" : null);
  const last = rated.at(-1);
  const recent = rated.filter(({ unix_ms: at }) => last.unix_ms - at < 10_000);
  const decided = recent.flatMap(({ rungs }) => rungs).reduce((sum, one) => sum + one, 0);
  tile("Decisions", `${number(decided / recent.length)} / s`, `${count(total("prefill_tokens"))} tokens to prefill`);
  tile("Cache hit rate", percent(last.credited_share), `engines report ${percent(last.reported_share)}`);
  tile("TTFT p50", estimate(last.ttft_p50_ms), `p95 ${estimate(last.ttft_p95_ms)}`);
  showPlane(state);
}

function showPlane({ routers: replication, indexers: replicas }) {
  const peers = replication?.peers.filter((one) => one.standing !== "dead") ?? [];
  const inStep = peers.filter((one) => one.standing === "following" && one.is_equal !== false);
  const ready = replicas.filter((one) => one.view?.ready);
  const behind = Math.max(0, ...ready.map((one) => one.view.lag_messages));
  const isWell = inStep.length === peers.length && ready.length && ready.length === replicas.length;
  const together = peers.length ? `${inStep.length} of ${peers.length}` : "alone";
  tile("Routers in step", together, `${ready.length} of ${replicas.length} indexers ready, ${count(behind)} records behind`, isWell ? null : "warn");
  const isolated = "This router does not receive its own broadcasts: it is cut off from the others.";
  const alone = replication && !peers.length ? "No other router is known." : "";
  setText(byId("routers-note"), replication?.is_isolated ? isolated : alone);
}

const rungs = new Map();
const bars = new Map();

function showLadder() {
  const sums = RUNGS.map((_, rung) => points.reduce((sum, point) => sum + point.rungs[rung], 0));
  const all = sums.reduce((sum, one) => sum + one, 0);
  const rows = RUNGS.map(([name, text], at) => ({ name, text, sum: sums[at] }));
  const shown = rows.filter(({ name, sum }) => sum || ALWAYS_SHOWN.includes(name));
  const key = ({ name }) => name;
  const make = ({ name, text }) => {
    const label = element("span", { class: `key rung-${name}` }, name.replaceAll("_", " "));
    const head = element("th", { scope: "row" }, label, " ", element("small", {}, text));
    return element("tr", {}, head, element("td", { class: "number" }), element("td", { class: "number" }));
  };
  keyed(byId("ladder").tBodies[0], rungs, shown, key, make, (row, { sum }) => {
    setText(row.cells[1], count(sum));
    setText(row.cells[2], all ? percent(sum / all) : NONE);
  });
  const bar = ({ name }) => element("div", { class: `rung-${name}` });
  keyed(byId("ladder-bar"), bars, shown, key, bar, (part, { sum }) => {
    part.style.flexGrow = all ? sum / all : 0;
    part.hidden = !sum;
  });
}

function show(state) {
  const rated = addHitRates(points);
  const { id, host, version, phase, connections } = state.router;
  setText(byId("router"), `router ${id.slice(0, 8)} on ${host} · ${version} · ${phase} · ${plural(connections, "connection")}`);
  showFaults(state.faults);
  showTiles(state, rated);
  charts.forEach((chart) => chart.show(rated));
  showLadder();
  fleet.show(state.workers);
  decisions.show(state.decisions, state.workers);
  routers.show(state.routers?.peers ?? [], (one) => one.router);
  indexers.show(state.indexers, (one) => one.id ?? "");
  document.body.dataset.states = Number(document.body.dataset.states ?? 0) + 1;
}

byId("pause").addEventListener("click", (event) => {
  isPaused = !isPaused;
  setAttribute(event.currentTarget, "aria-pressed", String(isPaused));
  setText(event.currentTarget, isPaused ? "Continue" : "Pause");
  if (known && !isPaused) show(known);
  if (known) connection(isPaused ? "off" : "good", isPaused ? "paused" : "live");
});

showChanges();
follow();
