// The audit of a run: how far old_logp is from the true one, by route, with verdicts.

import { ask, follow } from "./api.js";
import { Plot, colour, onTheme } from "./chart.js";
import { card } from "./details.js";
import { h, replace, scrolling, settled } from "./dom.js";
import { amount, whole } from "./format.js";
import { failed, problem, toRun } from "./parts.js";

const MEANING = "Tokens were scored again by full copies of the versions that sampled them. With an approximate old_logp, a share s of the staleness moves into D and a share d of the discrepancy moves into S. Exact routes have (s, d) = (0, 0), rollout (0, 1), and current_recompute (1, 0).";
const SIZE = 220;

const FACTORS = ["log D", "log S"];

// Points of two values, such as log D and log S, on axes that several clouds share.
function cloud({ name, points, names = FACTORS, reach }) {
  const [across, up] = names;
  const canvas = h("canvas", { width: 2 * SIZE, height: 2 * SIZE, class: "cloud", role: "img", "aria-label": `${name}: ${up} against ${across} of ${points.length} tokens, up to ${amount(reach[0])} and ${amount(reach[1])} nats` });
  const line = (pen, ...ends) => {
    pen.moveTo(...ends[0]);
    pen.lineTo(...ends[1]);
  };
  const draw = () => {
    const pen = canvas.getContext("2d");
    pen.setTransform(2, 0, 0, 2, 0, 0);
    pen.clearRect(0, 0, SIZE, SIZE);
    pen.strokeStyle = colour("rule");
    pen.strokeRect(0.5, 0.5, SIZE - 1, SIZE - 1);
    pen.beginPath();
    line(pen, [SIZE / 2, 0], [SIZE / 2, SIZE]);
    line(pen, [0, SIZE / 2], [SIZE, SIZE / 2]);
    if (names !== FACTORS) line(pen, [0, SIZE], [SIZE, 0]);
    pen.stroke();
    pen.fillStyle = colour("engine");
    pen.globalAlpha = points.length > 500 ? 0.25 : 0.5;
    for (const [x, y] of points) {
      pen.beginPath();
      pen.arc((SIZE / 2) * (1 + x / reach[0]), (SIZE / 2) * (1 - y / reach[1]), 2, 0, 7);
      pen.fill();
    }
    pen.globalAlpha = 1;
    pen.fillStyle = colour("quiet");
    pen.font = "12px system-ui, sans-serif";
    pen.textAlign = "right";
    pen.fillText(`${across} ±${amount(reach[0])}`, SIZE - 6, SIZE / 2 - 5);
    pen.textAlign = "left";
    pen.fillText(`${up} ±${amount(reach[1])}`, SIZE / 2 + 5, 14);
  };
  draw();
  return { element: h("div", { class: "facet" }, h("h4", {}, name), canvas), draw };
}

// The largest size of nearly all values.
function reachOf(values) {
  const sizes = values.map(Math.abs).sort((a, b) => a - b);
  return Math.max(1e-4, 1.15 * (sizes[Math.floor(0.995 * (sizes.length - 1))] || 0));
}

function facets(key, title, about, made, empty) {
  onTheme(key, () => made.forEach((each) => each.draw()));
  return card(title, about, made.length ? h("div", { class: "facets" }, made.map((each) => each.element)) : h("p", { class: "gap" }, empty));
}

function clouds(after) {
  const named = [["true", after.points], ...after.routes.map((each) => [each.route, each.points])].filter(([, points]) => points.length);
  const reach = [0, 1].map((axis) => reachOf(named.flatMap(([, points]) => points.map((point) => point[axis]))));
  return facets("audit", "log D against log S, by route", "The same tokens on common axes. Points on a line mean that the route does not separate the two ratios.",
    named.map(([name, points]) => cloud({ name, points, reach })), "No points were recorded.");
}

// Audited tokens of the newest steps, as [log D, log S, true log D, true log S].
function audited(tokens, route) {
  const [by_route, truly] = [tokens.map(([d, s]) => [d, s]), tokens.map(([, , d, s]) => [d, s])];
  const reach = [0, 1].map((axis) => reachOf([...by_route, ...truly].map((point) => point[axis])));
  const both = tokens.map(([, s, , true_s]) => [true_s, s]);
  const made = tokens.length ? [cloud({ name: route, points: by_route, reach }), cloud({ name: "true", points: truly, reach }),
    cloud({ name: "log S, true and by the route", points: both, names: ["true", "route"], reach: [reach[1], reach[1]] })] : [];
  return facets("audited", "Audited tokens, by the route and true", "Tokens of the newest steps. On the diagonal of the last plot the route's log S is the true one.", made, "No sample of audited tokens was recorded.");
}

// A table with a bar for each value.
function bars(title, about, head, rows, most, empty = "Nothing was recorded.") {
  const body = rows.map(([name, series, value]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, series), h("td", { class: "wide-cell" }, h("meter", { min: "0", max: "1", value: String(Math.min(1, value / most)), class: "ink-bar", "aria-label": `${name} ${series}` })), h("td", {}, amount(value))));
  const found = card(title, about, body.length ? scrolling(title, h("table", { class: "lags" }, h("thead", {}, h("tr", {}, head.map((each) => h("th", { scope: "col" }, each)))), h("tbody", {}, body))) : h("p", { class: "gap" }, empty));
  found.classList.add("full-row");
  return found;
}

function table(after) {
  const cells = after.routes.map((each) => h("tr", {}, each.cells.map((text, index) => (index ? h("td", {}, text) : h("th", { scope: "row" }, text)))));
  const notes = Object.entries(after.not_built).map(([name, why]) => h("p", { class: "gap" }, `${name} was not built: ${why}`));
  const legend = h("details", { class: "quiet" }, h("summary", {}, "Columns"), h("ul", {}, after.columns.filter((each) => each.about).map((each) => h("li", {}, `${each.name}: ${each.about}`))));
  return card("All routes on these tokens", `${whole(after.tokens)} action tokens of ${whole(after.steps)} recorded batches, scored by each route${after.dtype ? ` with ${after.dtype} weights` : ""}. Numerical noise, measured with different packing: ${amount(after.noise)} nats.`,
    scrolling("All routes", h("table", { class: "results" }, h("thead", {}, h("tr", {}, after.columns.map((each) => h("th", { scope: "col" }, each.name)))), h("tbody", {}, cells))), notes, legend);
}

function results(after) {
  if (!after) return h("section", {}, h("h2", {}, "All routes on recorded tokens"), h("p", { class: "gap" }, "Not measured. Train with --audit.record true, then `unstale audit` compares all routes on the recorded batches."));
  const errors = after.routes.flatMap((each) => Object.entries(each.by_lag).map(([lag, error]) => [each.route, `lag ${lag}`, error]));
  const agreements = after.routes.flatMap((each) => [["dropped", each.mask_f1], ["clipped", each.clip_f1]].filter(([, f1]) => f1 !== null).map(([what, f1]) => [each.route, what, f1]));
  return h("section", {}, h("h2", {}, "All routes on recorded tokens"), h("dl", { class: "meaning" }, after.routes.map((each) => h("div", {}, h("dt", {}, each.route), h("dd", {}, each.verdict)))), table(after), clouds(after),
    h("div", { class: "charts" }, bars("Error by lag", "Mean |the route's old_logp - the true one| in nats, by versions between sampling and training.", ["route", "lag", "", "error"], errors, Math.max(...errors.map((each) => each[2]), 1e-12)),
      bars("Agreement", "F1 of the dropped and of the clipped tokens: the route against the true old_logp. 1 is equal. 0: some are dropped or clipped, none of them by both. A route is left out where neither drops or clips a token.", ["route", "tokens", "", "F1"], agreements, 1, "No token was dropped or clipped in the recorded batches.")));
}

const SERIES = [
  ["Error over the run", "Mean |the route's old_logp - the true one| of a step's audited tokens, in nats, and the noise of another packing. Good: within the noise. Bad: it grows with staleness.", "count", { error: "audit/logp_error_abs_mean", noise: "audit/logp_noise_rms" }],
  ["Leaks over the run", "s: part of the staleness that is in D; d: part of the discrepancy that is in S. Good: both near 0. Bad: near 1, because D and S are then not what they are called.", "value", { s: "audit/staleness_leak", d: "audit/discrepancy_leak" }],
  ["Agreement over the run", "F1 of the dropped and of the clipped tokens. Good: 1. Bad: less: the route drops or clips other tokens than the true old_logp would.", "share", { dropped: "audit/mask_f1", clipped: "audit/clip_f1" }, "No token was dropped or clipped in the audited batches."],
];

export function audit(content, { run: name }) {
  let closed = false;
  let shown = "";
  const top = h("div");
  const below = h("div");
  const plots = SERIES.map(([title, about, scale, metrics, empty]) => ({ plot: new Plot({ title, scale, unit: scale === "share" ? "share" : "nats", empty }), title, about, metrics }));
  const sample = h("div");
  let sampled = "";
  const during = h("section", {}, h("h2", {}, "During training"), h("div", { class: "charts" }, plots.map((each) => card(each.title, each.about, each.plot.element))), sample);
  async function load() {
    try {
      const names = plots.flatMap((each) => Object.values(each.metrics));
      const [found, { series }] = await Promise.all([ask("audit", { run: name }), ask("series", { run: name, name: names })]);
      if (closed) return;
      const measured = Object.keys(found.during).length > 0;
      replace(top, h("h1", {}, "Audit of the old log-probabilities"), h("p", { class: "lead" }, MEANING), found.problems.map(problem),
        h("p", {}, h("a", { href: toRun(name) }, name), ` computes old_logp by the route ${found.route}, which is ${found.exact ? "exact by construction" : "approximate"}.`),
        measured ? h("p", { class: "verdict" }, h("b", {}, "During training: "), found.verdict) : h("p", { class: "gap" }, "The run measures no tokens while it trains: --audit.share does."));
      during.hidden = !measured;
      plots.forEach((each) => each.plot.set(Object.entries(each.metrics).map(([key, metric]) => ({ name: key, x: series[metric][0], y: series[metric][1] }))));
      const tokens = JSON.stringify(found.tokens);
      if (measured && tokens !== sampled) replace(sample, audited(found.tokens, found.route));
      sampled = tokens;
      const now = JSON.stringify(found.after);
      if (now !== shown) replace(below, results(found.after));
      shown = now;
      if (!top.isConnected) replace(content, top, during, below);
    } catch (error) {
      if (!top.isConnected && !closed) failed(content, error);
    }
  }
  const close = follow(name, settled(1000, load));
  load();
  return { close: () => { closed = true; close(); ["audit", "audited"].forEach((key) => onTheme(key, null)); plots.forEach((each) => each.plot.remove()); } };
}
