// The last decisions, with the terms of each candidate's cost and why the winner won.

import { byId, count, duration, element, keyed, NONE, number, percent, plural, setText, timeOfDay } from "./dom.js";

// Decisions that stay while they are open.
const PINNED_MAX = 4;

const blocksOf = ({ overlap }) => overlap.gpu + overlap.cpu + overlap.disk;
const isIn = (decision) => (one) =>
  one.worker === decision.worker && one.dp_rank === decision.dp_rank;

const isTimed = ({ policy }) => policy === "time" || policy === "approx";
const cost = (decision, value) =>
  isTimed(decision) ? duration(1000 * value) : `${number(value)} blocks`;

// Workers with several ranks.
let ranked = new Set();

function name({ worker, dp_rank: rank }) {
  if (worker == null) return "a source that is gone";
  return ranked.has(worker) ? `${worker} / ${rank}` : worker;
}

// What the winner has in its cache, in words.
function holding(winner) {
  const blocks = blocksOf(winner);
  if (blocks) return `${plural(blocks, "block")} cached there (${basis(winner)})`;
  if (winner.predicted_blocks) return `${plural(winner.predicted_blocks, "block")} expected there`;
  return "nothing known to be cached there";
}

function basis({ rung, state, reported_blocks: reported }) {
  return rung === "index" && !reported ? state : rung.replaceAll("_", " ");
}

// Requests of a source, and those that its engine has from elsewhere.
const requests = (one) => one.active_requests + one.foreign_requests;
// A term of predicted time. The requests from elsewhere are in the queue.
const millis = ({ time_ms: time }, term) => time[term] + (term === "queue" ? time.foreign : 0);
const factor = ({ factors }, term) => factors[term] ?? 1;

// The term of predicted time that is best against the next source.
function mainTerm(winner, next) {
  const part = (one, term) => factor(one, term) * millis(one, term);
  const saved = ["queue", "prefill", "decode"].map((term) => {
    return { term, ms: part(next, term) - part(winner, term) };
  });
  return saved.reduce((best, one) => (one.ms > best.ms ? one : best));
}

export function why(decision) {
  const winner = decision.cheapest.find(isIn(decision));
  if (!winner) return `drawn, and not among the ${decision.cheapest.length} cheapest`;
  const others = decision.cheapest.filter((one) => one !== winner);
  const [next] = others;
  const held = holding(winner);
  if (!next) return `the only candidate; ${held}`;
  if (decision.policy === "round-robin") return "its turn";
  if (decision.policy === "power-of-two") {
    return `fewest active requests of two at random: ${count(requests(winner))}`;
  }
  if (decision.policy === "random") return "drawn at random";
  if (decision.policy === "session") return `its session belongs there; ${held}`;
  if (decision.policy === "prefix-hash") return `prompts that begin so belong there; ${held}`;
  if (decision.policy === "least-load") {
    return `fewest active requests: ${count(requests(winner))}`;
  }
  const near = winner.is_near ? others.filter((one) => one.is_near) : [];
  if (near.length) {
    const fewest = Math.min(...near.map(requests));
    const reason = requests(winner) < fewest ? "load" : "a random draw at equal load";
    const rest = near.length > 1 ? ` and ${count(near.length - 1)} more` : "";
    return `near ${name(near[0])}${rest}, chosen by ${reason}; ${held}`;
  }
  const saved = next.cost - winner.cost;
  if (saved < 0) return `drawn with a probability of ${percent(winner.probability)}; ${held}`;
  if (!isTimed(decision)) {
    if (saved === 0) return `as cheap as ${name(next)}, a random draw; ${held}`;
    return `${cost(decision, saved)} cheaper than ${name(next)}; ${held}`;
  }
  const { term } = mainTerm(winner, next);
  return `${cost(decision, saved)} less than ${name(next)}, mostly ${term}; ${held}`;
}

const COLUMNS = [
  ["Source", (one) => name(one)],
  ["Rung", basis],
  ["GPU", ({ overlap }) => count(overlap.gpu), "blocks"],
  ["CPU", ({ overlap }) => count(overlap.cpu), "blocks"],
  ["Disk", ({ overlap }) => count(overlap.disk), "blocks"],
  ["Expected", (one) => count(one.predicted_blocks), "blocks"],
  ["Active", (one) => count(requests(one)), "requests"],
];
const times = (one, term, value) => {
  const by = factor(one, term);
  return by === 1 ? number(value) : `${number(value)} × ${number(by)}`;
};
// The terms of a row, each times its factor, add up to its cost.
const TIME_COLUMNS = [
  ["Queue", (one) => number(millis(one, "queue")), "ms"],
  ["Prefill", (one) => times(one, "prefill", one.time_ms.prefill), "ms"],
  ["Decode", (one) => times(one, "decode", one.time_ms.decode), "ms"],
  ["Cost", (one) => number(1000 * one.cost), "ms"],
];
const prefillBlocks = (one) =>
  Math.max(0, one.prefill_blocks + one.foreign_prefill_blocks - one.prediction_blocks);
const decodeBlocks = (one) => one.decode_blocks + one.foreign_decode_blocks;
const BLOCK_COLUMNS = [
  ["Prefill", (one) => times(one, "prefill", prefillBlocks(one)), "blocks"],
  ["Decode", (one) => times(one, "decode", decodeBlocks(one)), "blocks"],
  ["Cost", (one) => number(one.cost), "blocks"],
];
const CHANCE = ["Chance", (one) => percent(one.probability)];

// The table of one decision's candidates, cheapest first.
function candidates(decision) {
  const columns = [...COLUMNS, ...(isTimed(decision) ? TIME_COLUMNS : BLOCK_COLUMNS), CHANCE];
  const heads = columns.map(([label, , unit], at) => {
    const head = element("th", { scope: "col" }, label);
    if (at > 1) head.className = "number";
    if (unit) head.append(" ", element("small", {}, unit));
    return head;
  });
  const rows = decision.cheapest.map((one) => {
    const isWinner = isIn(decision)(one);
    const cells = columns.map(([, text], at) => {
      const cell = element(at === 0 ? "th" : "td", at === 0 ? { scope: "row" } : {}, text(one));
      if (at > 1) cell.className = "number";
      return cell;
    });
    if (isWinner) cells[0].append(" ", element("b", {}, "chosen"));
    else if (one.is_near) cells[0].append(" ", element("small", {}, "near"));
    return element("tr", isWinner ? { class: "winner" } : {}, ...cells);
  });
  const label = "Candidates and the terms of their cost";
  const head = element("thead", {}, element("tr", {}, ...heads));
  const table = element("table", { "aria-label": label }, head, element("tbody", {}, ...rows));
  return element("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": label }, table);
}

function notes(decision) {
  const found = [
    `Request ${decision.request_id}`,
    `${decision.cheapest.length} cheapest of ${plural(decision.candidates, "candidate")}`,
    `policy ${decision.policy}`,
    `predicted TTFT ${duration(decision.predicted_ttft_ms)}`,
    `credited ${plural(decision.credited_tokens, "token")}`,
    `engine reported ${decision.cached_tokens == null ? NONE : plural(decision.cached_tokens, "token")}`,
  ];
  return `${found.join(" · ")}.`;
}

export class DecisionList {
  constructor() {
    this.kept = new Map();
    this.known = new Map();
  }

  show(decisions, workers) {
    ranked = new Set(workers.filter(({ ranks }) => ranks.length > 1).map(({ worker }) => worker));
    const newest = new Set(decisions.map((one) => one.number));
    const pinned = [...this.known.values()].filter(
      ({ number: at }) => !newest.has(at) && this.kept.get(at)?.firstChild.open,
    );
    const shown = [...decisions, ...pinned.slice(0, PINNED_MAX)];
    this.known = new Map(shown.map((one) => [one.number, one]));
    if (!shown.length) return;
    const list = byId("decisions");
    if (!this.kept.size) list.replaceChildren();
    keyed(list, this.kept, shown, (one) => one.number, (one) => this.make(one), updateItem);
  }

  make(decision) {
    const summary = element("summary", {});
    summary.append(
      element("time", { class: "muted" }, timeOfDay(decision.unix_ms)),
      " ",
      element("span", { class: "muted" }, `${decision.model} → `),
      element("b", {}, name(decision)),
      element("span", { class: "why" }, why(decision)),
    );
    if (decision.moved_from) {
      const from = name(decision.moved_from);
      const moved = `Moved from ${from}, which another router chose at the same time.`;
      summary.append(element("span", { class: "why" }, moved));
    }
    const details = element("details", {}, summary);
    details.addEventListener("toggle", () => {
      if (!details.open || details.childElementCount > 1) return;
      const current = this.known.get(decision.number) ?? decision;
      details.append(candidates(current), element("p", { class: "muted notes" }, notes(current)));
    });
    return element("li", {}, details);
  }
}

// What engines report comes later than the decision.
function updateItem(item, decision) {
  const note = item.querySelector(".notes");
  if (note) setText(note, notes(decision));
}
