// Parts of a run's page that are no series over the steps: shares of time, engines, ages, attempts.

import { Plot } from "./chart.js";
import { h, scrolling, svg } from "./dom.js";
import { amount, percent, whole } from "./format.js";
import { toEpisode } from "./parts.js";

const head = (names) => h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col" }, name))));
const row = (name, ...cells) => h("tr", {}, h("th", { scope: "row" }, name), cells.map((cell) => h("td", {}, cell)));
export const card = (title, about, ...content) => h("figure", { class: "card" }, h("figcaption", {}, h("h3", {}, title), h("p", {}, about)), content);
const gap = (text) => h("p", { class: "gap" }, text);

// A bar whose parts add up to 100%, with its legend.
function bar({ name, about, parts }) {
  let x = 0;
  const boxes = parts.map(([, colour, share]) => {
    const box = svg("rect", { x: String(x), y: "0", width: String(100 * share), height: "10", class: `fill ${colour}` });
    x += 100 * share;
    return box;
  });
  const text = parts.map(([activity, , share]) => `${activity} ${percent(share)}`);
  return h("div", { class: "time-bar" }, h("b", {}, name), svg("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": `${name}, ${about}: ${text.join(", ")}` }, boxes),
    h("p", { class: "keys" }, parts.map(([activity, colour, share]) => h("span", { class: "key" }, svg("svg", { viewBox: "0 0 12 8", class: "square" }, svg("rect", { x: "0", y: "0", width: "12", height: "8", class: `fill ${colour}` })), activity, " ", h("b", {}, percent(share))))));
}

export const shares = (bars) => card("Where the time went", `Shares of the time${bars.length ? ` from ${bars[0].about} of the run` : ""}. A trainer that waits needs more generation; engines that are idle need a faster trainer, more tickets or more episodes.`,
  bars.length ? bars.map(bar) : gap("No activity was recorded yet."));

export function engines(rows) {
  const about = "State at the end of the last step. An engine with an older version, few cache hits or many restarts slows the whole run.";
  if (!rows.length) return card("Engines", about, gap("This run has no figures of single engines; the plots below have their totals."));
  const newest = Math.max(...rows.map((each) => each.version ?? -1));
  const state = (each) => (each.up === 0 ? h("b", { class: "badge bad" }, "down") : h("span", { class: "badge good" }, "works"));
  const version = (each) => (each.version === undefined ? "—" : each.version < newest ? h("b", { class: "badge bad" }, `${whole(each.version)}, ${newest - each.version} behind`) : whole(each.version));
  return card("Engines", about, scrolling("Engines", h("table", { class: "results" }, head(["engine", "state", "version", "load: requests", "busy", "tokens per second", "cache hits", "restarts", "last loss"]), h("tbody", {}, rows.map((each) =>
    row(`engine ${each.engine}`, state(each), version(each), whole(each.running), percent(each.busy_share), amount(each.sampled_tokens_per_s), percent(each.cached_share), whole(each.restarts ?? 0), each.cause ? `${each.cause} (${whole(each.lost)} in all)` : ""))))));
}

// Plots whose steps are not optimizer steps. Each has `set`, to draw new values in place.
export function ages() {
  const plot = new Plot({ title: "Staleness by place in the episode", unit: "versions", label: "tenth" });
  const about = "Mean and largest lag of the trained tokens, by tenth of the episode. The first tokens of a long episode are the oldest. Good: a slow fall. Bad: a maximum at the bound in most tenths: shorten episodes, or lower schedule.max_staleness.";
  return { element: card("Staleness by place in the episode", about, plot.element), close: () => plot.remove(), set: (found) => {
    const x = found.map((each) => each.tenth + 1);
    plot.set([{ name: "mean", x, y: found.map((each) => each.mean), colour: "engine" }, { name: "max", x, y: found.map((each) => each.max), colour: "bad", dots: true }]);
  } };
}

export function lagsOverSteps() {
  const plot = new Plot({ title: "Staleness over the steps", unit: "share", scale: "share" });
  const about = "Share of the trained tokens of each lag, step by step. Good: most tokens are of the smallest lags. Bad: the largest lag grows.";
  return { element: card("Staleness over the steps", about, plot.element), close: () => plot.remove(), set: (found) => {
    const lags = found.total.map(([lag]) => lag).slice(0, 6);
    const x = found.steps.map(([step]) => step);
    const sums = found.steps.map(([, pairs]) => pairs.reduce((sum, [, tokens]) => sum + tokens, 0));
    plot.set(lags.map((lag, number) => {
      const last = number === 5 && found.total.length > 6;
      const y = found.steps.map(([, pairs], at) => pairs.filter(([each]) => each === lag || (last && each > lag)).reduce((sum, [, tokens]) => sum + tokens, 0) / sums[at]);
      return { name: `lag ${lag}${last ? " and more" : ""}`, x, y, colour: `lag-${Math.min(lag, 5)}` };
    }));
  } };
}

export function sizes({ D, S }) {
  const table = (name, pairs) => {
    const most = Math.max(...pairs.map(([, mean]) => mean), 1e-12);
    const rows = pairs.map(([lag, mean]) => h("tr", {}, h("th", { scope: "row" }, `lag ${lag}`), h("td", { class: "wide-cell" }, h("meter", { min: "0", max: "1", value: String(mean / most), class: `ink-${name.toLowerCase()}-bar`, "aria-label": `lag ${lag}` })), h("td", {}, amount(mean))));
    return card(`|log ${name}| by lag`, name === "D" ? "Mean over all tokens with an advantage, in nats. Good: equal at all lags, because D belongs to one version." : "Mean over all tokens with an advantage, in nats. Good: 0 at lag 0 and a slow rise.",
      pairs.length ? h("table", { class: "lags" }, head(["lag", "", "mean"]), h("tbody", {}, rows)) : gap("No values by lag were recorded."));
  };
  return h("div", { class: "charts" }, table("D", D), table("S", S));
}

export function attempts() {
  const plot = new Plot({ title: "Lengths of all episodes and of those trained on", unit: "share", scale: "share", label: "at most tokens" });
  const table = h("div");
  const about = "No episode is dropped for being long or slow. But if long ones fail more often, training prefers short ones. Good: both curves are equal. Bad: the curve of those trained on is to the left.";
  return { element: card("Generated and trained-on episodes", about, table, plot.element), close: () => plot.remove(), set: (found) => {
    const x = found.curve.map(([tokens]) => tokens);
    plot.set([{ name: "all that ended", x, y: found.curve.map((each) => each[1]), colour: "engine" }, { name: "trained on", x, y: found.curve.map((each) => each[2]), colour: "trainer" }]);
    const rows = found.kinds.map((each) => row(each.name, whole(each.count), amount(each.sampled_tokens), amount(each.turns), percent(each.success), amount(each.reward)));
    table.replaceChildren(scrolling("Episodes by outcome", h("table", { class: "results" }, head(["episodes", "number", "mean sampled tokens", "mean turns", "success", "reward"]), h("tbody", {}, rows))),
      h("p", { class: found.is_biased ? "warning" : "quiet" }, found.sentence));
  } };
}

export function examples(name, found) {
  const rows = found.map((each) => row(each.why, toEpisode(name, each.episode), whole(each.step), amount(each.reward), whole(each.versions), each.task));
  return card("Episodes to read", "A success and a failure from the first and from the last quarter of the steps, sampled by several versions if there are such.",
    rows.length ? h("div", { class: "scroll" }, h("table", { class: "results" }, head(["", "", "step", "reward", "versions", "task"]), h("tbody", {}, rows))) : gap("No episode was trained on yet."));
}

export function forks(name, found) {
  if (!found.length) return null;
  const rows = found.map((each) => row(each.reason, whole(each.count), toEpisode(name, each.episode), whole(each.at)));
  return card("Forks", "An agent's messages differed from the recorded history. A new branch of the episode begins there.", scrolling("Forks", h("table", { class: "results" }, head(["reason", "number", "first", "at message"]), h("tbody", {}, rows))));
}
