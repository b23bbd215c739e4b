// Two runs side by side: their curves in the same plots, and the options in which they differ.

import { ask, follow } from "./api.js";
import { h, replace, settled } from "./dom.js";
import { amount, duration, percent } from "./format.js";
import { badge, failed, success, toRun } from "./parts.js";
import { cards, learning } from "./run.js";

export function compare(content, _, query) {
  const names = [query.get("a"), query.get("b")];
  let made = null;
  let curve = null;
  let closed = false;
  const stops = [];

  async function choose() {
    const { runs } = await ask("runs");
    const picked = [names[0] ?? runs[0]?.name, names[1] ?? runs[1]?.name];
    const select = (index) => h("select", { "aria-label": `Run ${"AB"[index]}`, onchange: (event) => {
      picked[index] = event.target.value;
      location.hash = `#/compare?a=${encodeURIComponent(picked[0])}&b=${encodeURIComponent(picked[1])}`;
    } }, runs.map((run) => h("option", { value: run.name, selected: run.name === picked[index] }, run.name)));
    return h("div", { class: "bar tools" }, h("label", {}, "A ", select(0)), h("label", {}, "B ", select(1)));
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

  function differences([a, b]) {
    const options = [...new Set([...Object.keys(a.options), ...Object.keys(b.options)])].filter((name) => a.options[name] !== b.options[name]).sort();
    if (!options.length) return h("p", { class: "quiet" }, "All options are equal.");
    return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["option", "A", "B"].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, options.map((name) =>
      h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, a.options[name] ?? "—"), h("td", {}, b.options[name] ?? "—"))))));
  }

  function sections([a, b]) {
    const has = (chart, other) => other.some((section) => section.charts.some((each) => each.title === chart.title));
    const only = (section) => ({ ...section, charts: section.charts.filter((chart) => has(chart, b.sections)).map((chart) => ({ ...chart, lines: shared(chart, b.sections) })).filter((chart) => chart.lines.length) });
    return a.sections.map(only).filter((section) => section.charts.length);
  }
  function shared(chart, other) {
    const metrics = new Set(other.flatMap((section) => section.charts).flatMap((each) => each.lines).map((line) => line.metric));
    return chart.lines.filter((line) => metrics.has(line.metric));
  }

  const tables = h("div");
  async function load() {
    try {
      const found = await Promise.all(names.map((run) => ask("run", { run })));
      if (closed) return;
      replace(tables, table(found));
      if (made) made.refresh();
      else {
        curve = learning(names);
        made = cards(names, sections(found));
        replace(content, h("h1", {}, "Compare"), await choose(), tables, h("p", { class: "quiet" }, "A difference of two single runs is mostly chance: `unstale compare` runs several seeds."), curve.element,
          h("section", {}, h("h2", {}, "Options that differ"), differences(found)), made.elements);
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
