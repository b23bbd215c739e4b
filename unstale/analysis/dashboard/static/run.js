// One run: its outcome, key figures, health, plots and timeline, live.

import { FROZEN, ask, askSeries, follow } from "./api.js";
import { Plot } from "./chart.js";
import * as details from "./details.js";
import { h, replace, scrolling, settled } from "./dom.js";
import { amount, duration, percent, whole } from "./format.js";
import { badge, bodyOf, failed, part, problem, tile, toEpisode, toRun } from "./parts.js";
import { tokenPlane } from "./plane.js";
import { timeline } from "./timeline.js";
import { whileInView } from "./view.js";

const POINTS = 500;
const HELD_OUT = 500;
const SUCCESS = "rollout/success_rate";
// Steps of which the curve of success is the mean.
const MEAN_STEPS = 5;
// Lags with a bar of their own. One more bar has the larger ones.
const LAG_BARS = 12;
const DETAILS_MS = 5000;
const DETAILS_REST = 30;
// Events that are listed at once. A longer list is closed at first.
const FEW_EVENTS = 12;

// A card with one plot. It asks for its series when it comes into view, and after each new step.
export class Card {
  constructor(names, chart, watch, axis) {
    Object.assign(this, { names, chart, axis, inView: false, stale: true });
    this.plot = new Plot({ title: chart.title, unit: chart.unit, scale: chart.scale, label: axis });
    const unit = chart.unit && chart.unit !== "share" ? ` (${chart.unit})` : "";
    this.element = h("figure", { class: "card chart" }, h("figcaption", {}, h("h3", {}, chart.title, h("small", { class: "unit" }, unit)), h("p", {}, chart.about)), this.plot.element, chart.reading ? h("p", { class: "reading-of" }, chart.reading) : null);
    this.element.card = this;
    watch.observe(this.element);
  }

  async load() {
    if (!this.inView || !this.stale) return;
    this.stale = false;
    const metrics = this.chart.lines.map((line) => line.metric);
    try {
      const answers = await Promise.all(this.names.map((run) => askSeries(run, metrics, { points: POINTS, x: this.axis })));
      this.plot.set(answers.flatMap(({ series }, number) => this.lines(series, number)));
    } catch (error) {
      this.stale = true;
      replace(this.plot.keys, error.message);
    }
  }

  lines(series, number) {
    const several = this.names.length > 1;
    return this.chart.lines.map(({ name, metric }, index) => {
      const [x, y] = series[metric];
      const line = { name: several ? `${"AB"[number]} ${name}` : name, x, y };
      if (several) Object.assign(line, { colour: ["engine", "trainer"][number], dash: index ? [2 + 4 * index, 4] : undefined });
      if (metric.endsWith("_bound")) Object.assign(line, { colour: "bad", dash: [5, 4] });
      return line;
    });
  }
}

// The cards of some sections, and a function that marks them all as stale. `axis` is one of AXES.
export function cards(names, sections, axis = "step") {
  const made = [];
  const watch = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      target.card.inView = isIntersecting;
      target.card.load();
    }
  }, { rootMargin: "300px" });
  const elements = sections.map((section) => {
    const charts = section.charts.map((chart) => new Card(names, chart, watch, axis));
    made.push(...charts);
    const grid = h("div", { class: "charts" }, charts.map((card) => card.element));
    if (!section.name.startsWith("other-")) return part(`section-${section.name}`, section.title, h("p", { class: "lead" }, section.about), grid);
    return h("details", { class: "more", id: `section-${section.name}` }, h("summary", {}, section.title, h("span", { class: "quiet" }, ` ${charts.length} other metrics`)), grid);
  });
  return {
    elements,
    refresh: () => made.forEach((card) => ((card.stale = true), card.load())),
    close: () => (watch.disconnect(), made.forEach((card) => card.plot.remove())),
  };
}

export function learning(names, axis = "step") {
  const plot = new Plot({ title: "Learning curve", unit: "share", scale: "share", height: 240, label: axis });
  const about = "Share of solved tasks: rollouts of each step, the mean of the last five steps, and held-out tasks with a 95% interval.";
  const element = h("figure", { class: "card" }, h("figcaption", {}, h("h3", {}, "Learning curve"), h("p", {}, about)), plot.element);
  async function load(runs) {
    const steps = runs.map((run) => (axis === "step" ? [] : run.evaluations.slice(-HELD_OUT).map((each) => each.step)));
    const several = names.length > 1;
    const [answers, single] = await Promise.all([
      Promise.all(names.map((run, number) => askSeries(run, [SUCCESS], { points: POINTS, x: axis, at: steps[number], window: MEAN_STEPS }))),
      several ? null : askSeries(names[0], [SUCCESS], { points: POINTS, x: axis }),
    ]);
    plot.set(answers.flatMap(({ series, at }, number) => {
      const [x, y] = series[SUCCESS];
      const before = several ? `${"AB"[number]} ` : "";
      const tint = several ? ["engine", "trainer"][number] : "engine";
      const places = new Map(steps[number].map((step, index) => [step, at[index]]));
      const held = runs[number].evaluations.map((each) => ({ ...each, x: axis === "step" ? each.step : places.get(each.step) })).filter((each) => Number.isFinite(each.x))
        .filter((each) => each.success !== null);
      const counted = held.length && held.every((each) => each.interval);
      const lines = several ? [] : [{ name: "rollouts", x: single.series[SUCCESS][0], y: single.series[SUCCESS][1], colour: tint, faint: true }];
      if (x.length > 1) lines.push({ name: `${before}rollouts, mean of ${MEAN_STEPS}`, x, y, colour: tint, faint: several });
      lines.push({ name: `${before}held out`, x: held.map((each) => each.x), y: held.map((each) => each.success), colour: several ? tint : "good", dots: true,
        low: counted ? held.map((each) => each.interval[0]) : undefined, high: counted ? held.map((each) => each.interval[1]) : undefined });
      return lines;
    }), axis === "step" ? runs.flatMap((run) => run.data_changes) : []);
  }
  return { element, load, close: () => plot.remove() };
}

function outcome({ outcome: found, remarks }) {
  const share = ([text, about]) => h("div", { class: "share" }, h("b", {}, text), h("small", {}, about));
  const shares = found?.shares.flatMap((each, index) => (index ? [h("span", { class: "arrow", "aria-label": "to" }, "→"), share(each)] : [share(each)]));
  return [found ? h("div", { class: `outcome${found.better ? " better" : ""}` }, shares, h("p", {}, found.note)) : h("p", { class: "quiet" }, "Too few steps were recorded to show an outcome."), remarks.map(problem)];
}

const tiles = (run) => h("dl", { class: "tiles" }, run.tiles.map((each) => tile(...each)));

function health(run) {
  const wrong = run.checks.filter((check) => check.text);
  const titles = (passed) => run.checks.filter((check) => check.passed === passed).map((check) => check.title).join("; ");
  const [right, open] = [titles(true), titles(null)];
  const sound = right && !open && !wrong.length && !run.failures.text ? "No sign was found that the run could not learn. " : "";
  return [
    wrong.map((check) => h("p", { class: "warning" }, h("b", {}, `${whole(check.steps)} of ${whole(run.step)} steps, first step ${whole(check.step)}: `), check.text)),
    run.failures.text ? h("p", { class: "warning" }, run.failures.text) : null,
    right ? h("p", { class: "quiet" }, `${sound}Checks that hold: ${right}.`) : null,
    open ? h("p", { class: "quiet" }, `Too few steps to tell: ${open}.`) : null,
    run.checks.length ? null : h("p", { class: "quiet" }, "No step was recorded."),
  ];
}

// The three log-probabilities of a token, and what the two ratios between them contain here.
function stations(run) {
  const station = (kind, sign, name, about) => h("div", { class: `station ${kind}` }, h("b", {}, sign), h("code", {}, name), h("small", {}, about));
  const link = (name, means, size) => h("div", { class: `link ${name.toLowerCase()}` }, h("b", {}, name), h("span", {}, means), h("small", {}, size === null ? "" : `mean |log ${name}| ${amount(size)}`));
  const old = run.exact ? ["π", h("sub", {}, "old")] : "approximation";
  return h("div", { class: "factors" }, station("engine-side", "μ", "behavior_logp", `engine, ${run.options["engine.dtype"] ?? "?"}`), link("D", run.meanings[0], run.figures.log_d), station(run.exact ? "" : "stand-in", old, "old_logp", run.route),
    link("S", run.meanings[1], run.figures.log_s), station("trainer-side", "π", "logp", `trainer, ${run.options["trainer.dtype"] ?? "?"}`));
}

function factors(run) {
  const mixed = run.exact || !run.route ? null : h("p", { class: "warning" }, `${run.route} is an approximate route: ${run.route === "rollout" ? "it takes old_logp from the engine, so log S contains discrepancy and staleness" : "wherever this page shows D or S, discrepancy and staleness are mixed"}. Exact routes: ${run.exact_routes.join(", ")}.`);
  return part("section-meaning", "What D and S are here", h("p", { class: "lead" }, run.factors.join(" ")), stations(run), mixed,
    h("dl", { class: "meaning" }, run.semantics.map(([name, text]) => h("div", {}, h("dt", {}, name), h("dd", {}, text)))));
}

function lagBars(answer, bound) {
  const total = answer.total.reduce((sum, [, tokens]) => sum + tokens, 0);
  if (!total) return h("p", { class: "gap" }, "No staleness was recorded yet.");
  const later = answer.total.slice(LAG_BARS);
  const rest = later.length ? [[later[0][0], later.reduce((sum, [, tokens]) => sum + tokens, 0)]] : [];
  const rows = [...answer.total.slice(0, LAG_BARS), ...rest].map(([lag, tokens], index) => {
    const name = index < LAG_BARS ? `lag ${lag}` : `lag ${lag} or more`;
    const bar = h("meter", { min: "0", max: "1", value: String(tokens / total), class: `lag-${Math.min(lag, 5)}`, "aria-label": name });
    return h("tr", {}, h("th", { scope: "row" }, name), h("td", { class: "wide-cell" }, bar), h("td", {}, percent(tokens / total, 1)), h("td", {}, whole(tokens)));
  });
  const over = bound !== null && answer.total.some(([lag]) => lag > bound) ? problem(`Tokens of lag ${answer.total.at(-1)[0]} were trained on, beyond the bound of ${bound}.`) : null;
  const mean = answer.total.reduce((sum, [lag, tokens]) => sum + lag * tokens, 0) / total;
  return h("div", {}, over, h("p", { class: "quiet" }, `The trained tokens were ${mean.toFixed(2)} versions old on average.`), h("table", { class: "lags" }, h("thead", {}, h("tr", {}, ["staleness", "", "share", "tokens"].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, rows)));
}

// The summary of a part that can be opened, without its numbers, which change.
const titleOf = (part) => part.querySelector("summary").textContent.replace(/[\d,]+/g, "");

function again(run, log) {
  const options = Object.entries(run.options);
  return part("again", "Events and options",
    h("details", { open: log.length <= FEW_EVENTS }, h("summary", {}, `${log.length} newest events`), scrolling("Events", h("table", {}, h("tbody", {}, log.map((event) =>
      h("tr", {}, h("td", {}, duration(event.time)), h("td", {}, event.kind), h("td", {}, event.text))))))),
    run.failures.count ? h("details", {}, h("summary", {}, run.failures.count > run.failures.rows.length ? `${whole(run.failures.count)} failed episodes, the newest ${run.failures.rows.length} listed` : `${whole(run.failures.count)} failed episodes`), scrolling("Failed episodes", h("table", {}, h("tbody", {}, run.failures.rows.map((row) =>
      h("tr", {}, h("td", {}, row.episode ? toEpisode(run.name, row.episode, row.episode) : ""), h("td", {}, row.task), h("td", {}, row.stage), h("td", {}, row.error))))))) : null,
    run.failures.held_out ? h("p", { class: "quiet" }, `${whole(run.failures.held_out)} episodes of evaluations failed.`) : null,
    run.command ? [h("pre", { class: "command" }, run.command), h("p", { class: "quiet" }, run.command_about)] : null,
    run.started.length ? h("details", {}, h("summary", {}, "Machine and versions"), h("ul", { class: "knobs" }, run.started.map(([name, value]) => h("li", {}, name, h("code", {}, value))))) : null,
    options.length ? h("details", {}, h("summary", {}, `${options.length} options`), h("ul", { class: "knobs" }, options.map(([name, value]) => h("li", { class: run.changed.includes(name) ? "changed" : undefined }, name, h("code", {}, value)))), h("p", { class: "quiet" }, "Marked options differ from their defaults.")) : h("p", { class: "gap" }, "The options could not be read."));
}

// Buttons that lead to the sections of the page.
function contents(plots) {
  const go = (section) => {
    bodyOf(section).open = true;
    section.scrollIntoView();
    section.setAttribute("tabindex", "-1");
    section.focus({ preventScroll: true });
  };
  return h("div", { class: "contents", role: "group", "aria-label": "Sections of this page" }, [...plots.querySelectorAll("section[id]")].map((section) => h("button", { type: "button", onclick: () => go(section) }, section.querySelector("h2").textContent)));
}

export function run(content, { run: name }) {
  replace(content, h("p", { class: "quiet", role: "status" }, `Reading ${name}…`));
  let made = null;
  let sections = "";
  let closed = false;
  let latest = null;
  let below = "";
  const curve = learning([name]);
  const times = timeline(name);
  const plane = tokenPlane(name);
  const [ages, lagged, attempts] = [details.ages(), details.lagsOverSteps(), details.attempts()];
  const [top, nav, plots, bottom, shares, engines, sizes, histogram, examples, forks] = Array.from({ length: 10 }, () => h("div"));
  const episodes = part("section-episodes", "Episodes", examples, attempts.element, forks);

  async function fetch_details() {
    try {
      const found = await ask("details", { run: name });
      if (closed) return;
      replace(shares, details.shares(found.shares));
      replace(engines, details.engines(found.engines));
      replace(sizes, details.sizes(found.sizes));
      replace(examples, details.examples(name, found.examples));
      replace(forks, details.forks(name, found.forks));
      ages.set(found.ages);
      attempts.set(found.attempts);
    } catch (error) {
      replace(shares, problem(error.message));
    }
  }

  async function fetch_lags() {
    try {
      const found = await ask("lags", { run: name });
      if (closed) return;
      replace(histogram, details.card("Staleness of the trained tokens", "Versions published between sampling and training, over all steps.", lagBars(found, latest.figures.staleness_bound)));
      lagged.set(found);
    } catch (error) {
      replace(histogram, problem(error.message));
    }
  }

  // Parts that the user opened stay open.
  async function fetch_log() {
    try {
      const { events } = await ask("log", { run: name });
      const now = JSON.stringify([events, latest.failures, latest.options]);
      if (closed || now === below) return;
      below = now;
      const open = [...bottom.querySelectorAll("details")].map((each) => [titleOf(each), each.open]);
      replace(bottom, again(latest, events));
      for (const each of bottom.querySelectorAll("details")) {
        const before = open.find(([title]) => title === titleOf(each));
        if (before) each.open = before[1];
      }
    } catch (error) {
      replace(bottom, problem(error.message));
    }
  }

  // The answer reads all episodes, so its pause is long.
  const viewed = [
    whileInView([shares, engines, sizes, ages.element, episodes], fetch_details, { pause: DETAILS_MS, rest: DETAILS_REST }),
    whileInView([histogram, lagged.element], fetch_lags),
    whileInView([bottom], fetch_log),
  ];

  // Where the parts that are no series stand: after the plots of their section.
  function place(element, section) {
    const body = bodyOf(element);
    if (section === "ratios") body.append(sizes, plane.element);
    if (section === "schedule") body.append(h("div", { class: "charts" }, lagged.element, ages.element), histogram);
    if (section === "engines") body.insertBefore(engines, body.querySelector(".charts"));
    return element;
  }

  async function load() {
    let found;
    try {
      found = await ask("run", { run: name });
    } catch (error) {
      if (!made && !closed) failed(content, error);
      return;
    }
    if (closed) return;
    latest = found;
    const env = found.options["task.env"];
    const facts = [found.recipe, env === found.recipe ? "" : env, `seed ${found.seed ?? "?"}`, `${found.step} of ${found.steps ?? "?"} steps`, duration(found.figures.seconds), found.techniques].filter(Boolean).join(" · ");
    const to = (page, text) => h("a", { class: "go", href: `${toRun(name)}/${page}` }, text);
    const links = h("p", { class: "bar" }, FROZEN ? null : [to("episodes", `${whole(found.index.started)} episodes`), to("factors", "D against S")], to("audit", "Audit of old_logp"), h("span", { class: "quiet" }, facts));
    replace(top, h("div", { class: "bar" }, h("h1", {}, name), badge(found)), links, outcome(found),
      found.end ? h("p", { class: found.state === "finished" ? "quiet" : "end" }, found.end) : null,
      found.error ? h("details", { class: "error", open: true }, h("summary", {}, "The error that ended the run"), h("pre", {}, found.error)) : null,
      [...found.gaps, ...found.problems].map(problem), tiles(found), h("p", { class: "pace" }, `${found.pace.sentence} ${found.pace.advice}`), health(found), found.live ? h("p", { class: "quiet" }, "All episodes and tokens: ", h("code", {}, found.live)) : null);
    const now = JSON.stringify(found.sections);
    if (now !== sections) {
      sections = now;
      made?.close();
      made = cards([name], found.sections);
      const [before, after] = [[], []];
      found.sections.forEach((section, index) => (["outcome", "signal", "rewards", "health"].includes(section.name) ? before : after).push(place(made.elements[index], section.name)));
      const speed = ["section-ratios", "section-schedule", "section-engines"];
      const rest = after.filter((element) => !speed.includes(element.id));
      replace(plots, before, factors(found), after.filter((element) => speed.includes(element.id)), shares, times.element, episodes, rest);
      replace(nav, contents(plots));
    } else made.refresh();
    if (!top.isConnected) replace(content, top, nav, curve.element, plots, bottom);
    curve.load([found]).catch(() => {});
    times.load();
    plane.refresh();
    for (const each of viewed) each.refresh();
  }
  const reload = settled(400, load);
  const close = follow(name, reload);
  load();
  return { close: () => { closed = true; close(); reload.cancel(); made?.close(); for (const each of [curve, times, plane, ages, lagged, attempts, ...viewed]) each.close(); } };
}
