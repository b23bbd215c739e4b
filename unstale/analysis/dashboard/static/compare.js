// Two runs side by side: their curves in the same plots, and the options in which they differ.

import { ask, follow } from "./api.js";
import { h, replace, scrolling, settled } from "./dom.js";
import { amount, duration, percent } from "./format.js";
import { badge, failed, problem, success, toRun } from "./parts.js";
import { cards, learning } from "./run.js";

// What the curves have on their x axis, and its name in the choice.
const AXES = { step: "steps", seconds: "seconds of training", tokens: "sampled tokens" };

export function compare(content, _, query) {
  const names = [query.get("a"), query.get("b")];
  const axis = query.get("x") in AXES ? query.get("x") : "step";
  let made = null;
  let curve = null;
  let closed = false;
  const stops = [];

  async function choose() {
    const { runs } = await ask("runs");
    const picked = [names[0] ?? runs[0]?.name, names[1] ?? runs[1]?.name];
    const go = (x) => (location.hash = `#/compare?a=${encodeURIComponent(picked[0])}&b=${encodeURIComponent(picked[1])}${x === "step" ? "" : `&x=${x}`}`);
    const select = (index) => h("select", { "aria-label": `Run ${"AB"[index]}`, onchange: (event) => {
      picked[index] = event.target.value;
      go(axis);
    } }, runs.map((run) => h("option", { value: run.name, selected: run.name === picked[index] }, run.name)));
    const over = h("select", { id: "x-axis", onchange: () => go(over.value) }, Object.entries(AXES).map(([value, text]) => h("option", { value, selected: value === axis }, text)));
    return h("div", { class: "bar tools" }, h("label", {}, "A ", select(0)), h("label", {}, "B ", select(1)), made ? h("label", {}, "curves over ", over) : null);
  }

  function table(found) {
    const [a, b] = found;
    const row = (name, ...values) => h("tr", {}, h("th", { scope: "row" }, name), values.map((value) => h("td", {}, value)));
    const figure = (name, key, show) => row(name, ...found.map((run) => show(run.figures[key])));
    return h("div", { class: "scroll" }, h("table", { class: "results" }, h("thead", {}, h("tr", {}, h("th", {}), found.map((run, index) => h("th", { scope: "col" }, `${"AB"[index]}: `, h("a", { href: toRun(run.name) }, run.name))))), h("tbody", {},
      row("state", badge(a), badge(b)), row("step", ...found.map((run) => `${run.step} of ${run.steps ?? "?"}`)), row("route", a.route, b.route),
      row("held-out success, first", ...found.map((run) => success(run.evaluations[0]))), row("held-out success, last", ...found.map((run) => success(run.evaluations.at(-1)))),
      figure("time", "seconds", duration), figure("staleness, max", "staleness_max", amount), figure("mean |log D|", "log_d", amount), figure("mean |log S|", "log_s", amount),
      figure("kept", "kept", (value) => percent(value, 1)), figure("clipped", "clipped", (value) => percent(value, 1)),
      figure("engine, tokens per second", "engine_tokens_per_s", amount), figure("trainer, tokens per second", "trainer_tokens_per_s", amount))));
  }

  // The value of an option as on the command line.
  const option = (run, name) => ({ True: "true", False: "false" })[run.options[name]] ?? run.options[name] ?? "—";

  function differences([a, b]) {
    const options = [...new Set([...Object.keys(a.options), ...Object.keys(b.options)])].filter((name) => a.options[name] !== b.options[name]).sort();
    if (!options.length) return h("p", { class: "quiet" }, "All options are equal.");
    return scrolling("Options that differ", h("table", {}, h("thead", {}, h("tr", {}, ["option", "A", "B"].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, options.map((name) =>
      h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, option(a, name)), h("td", {}, option(b, name)))))));
  }

  // The plots of both runs. A plot or line that only one run has is shown with this run alone.
  function sections([a, b]) {
    const all = [...a.sections, ...b.sections];
    return [...new Set(all.map((section) => section.name))].map((name) => {
      const [mine, other] = [a, b].map((run) => run.sections.find((section) => section.name === name)?.charts ?? []);
      const charts = mine.map((chart) => joined(chart, other.find((each) => each.title === chart.title)));
      const others = other.filter((chart) => !mine.some((each) => each.title === chart.title));
      return { ...all.find((section) => section.name === name), charts: [...charts, ...others] };
    });
  }
  function joined(chart, other) {
    const known = new Set(chart.lines.map((line) => line.metric));
    return { ...chart, lines: [...chart.lines, ...(other?.lines ?? []).filter((line) => !known.has(line.metric))] };
  }

  const NAMES = { success: "success", reward: "reward", sampled_tokens: "sampled tokens", turns: "turns" };
  function paired(found) {
    const about = "Finished groups with the same number and the same task in both runs: mean of A, mean of B, and B - A with its 95% interval over groups. A single group has no interval, and neither have equal differences. With equal groups per step they were also trained on in the same step. Tasks are held equal, the chance of sampling is not. The command \"unstale compare\" runs several seeds.";
    if (!found.groups) return h("p", { class: "gap" }, "No group has the same task in both runs, so they cannot be compared in pairs. Runs with the same seed and task options draw the same tasks.");
    const show = (name, value) => (name === "success" ? percent(value, 1) : amount(value));
    const rows = (figures, groups) => figures.map((each) => {
      const [low, high] = each.interval ?? [];
      const clear = each.interval && (low > 0 || high < 0);
      return h("tr", {}, h("th", { scope: "row" }, NAMES[each.name]), h("td", {}, groups), h("td", {}, show(each.name, each.a)), h("td", {}, show(each.name, each.b)),
        h("td", {}, h(clear ? "b" : "span", {}, show(each.name, each.difference)), each.interval ? h("small", {}, ` ${show(each.name, low)} to ${show(each.name, high)}`) : ""));
    });
    return [h("p", { class: "lead" }, about), scrolling("Pairs", h("table", { class: "results" }, h("thead", {}, h("tr", {}, ["figure", "groups", "A", "B", "B - A"].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {},
      rows(found.figures, `all ${found.groups} common`), rows(found.late, `last ${found.late_groups}`)))), found.only ? h("p", { class: "quiet" }, `${found.only} groups were finished in one run only, or had different tasks.`) : null];
  }

  const tables = h("div");
  const pairs = h("div");
  async function load() {
    try {
      const found = await Promise.all(names.map((run) => ask("run", { run })));
      if (closed) return;
      replace(tables, table(found));
      ask("pairs", { a: names[0], b: names[1] }).then((answer) => closed || replace(pairs, paired(answer)), (error) => replace(pairs, problem(error.message)));
      if (made) made.refresh();
      else {
        curve = learning(names, axis);
        made = cards(names, sections(found), axis);
        replace(content, h("h1", {}, "Compare"), await choose(), tables, h("p", { class: "quiet" }, "A difference of two single runs is mostly chance. The command \"unstale compare\" runs several seeds."), curve.element,
          h("section", {}, h("h2", {}, "In pairs"), pairs), h("section", {}, h("h2", {}, "Options that differ"), differences(found)), made.elements);
      }
      curve.load(found).catch(() => {});
    } catch (error) {
      if (!made && !closed) failed(content, error);
    }
  }
  if (names[0] === null || names[1] === null) {
    choose().then((tools) => replace(content, h("h1", {}, "Compare"), h("p", { class: "lead" }, "Choose two runs."), tools), (error) => failed(content, error));
  } else {
    const soon = settled(500, load);
    for (const name of new Set(names)) stops.push(follow(name, soon));
    load();
  }
  return { close: () => { closed = true; stops.forEach((stop) => stop()); made?.close(); curve?.close(); } };
}
