// All runs with their success, those written last first; two of them can be compared.

import { ask, follow } from "./api.js";
import { sparkline } from "./chart.js";
import { h, replace, settled } from "./dom.js";
import { badge, failed, problem, success, toRun } from "./parts.js";

export function runs(content) {
  const chosen = new Set();
  const button = h("button", { type: "button", disabled: true, onclick: () => compare() }, "Compare two");
  const body = h("tbody");
  const note = h("p", { class: "quiet", role: "status" }, "Reading the runs…");
  const trouble = h("div");
  const filter = h("input", { type: "search", placeholder: "name, recipe or route", "aria-label": "Show only runs with this text", oninput: () => draw() });
  const head = h("tr", {}, ["", "run", "state", "step", "success", "held out", "recipe", "route"].map((name) => h("th", { scope: "col" }, name || h("span", { class: "unseen" }, "choose"))));
  replace(content, h("h1", {}, "Runs"), note, trouble, h("div", { class: "bar tools" }, filter, button), h("div", { class: "scroll" }, h("table", { class: "results" }, h("thead", {}, head), body)));
  let answer = null;
  let shown = "";

  function compare() {
    const [a, b] = [...chosen];
    location.hash = `#/compare?a=${encodeURIComponent(a)}&b=${encodeURIComponent(b)}`;
  }

  function choose(name, box) {
    if (box.checked) chosen.add(name);
    else chosen.delete(name);
    button.disabled = chosen.size !== 2;
    button.textContent = chosen.size === 2 ? "Compare these two" : "Compare two";
  }

  function row(run) {
    const box = h("input", { type: "checkbox", "aria-label": `Choose ${run.name} to compare`, checked: chosen.has(run.name), onchange: () => choose(run.name, box) });
    const [first, last] = [run.evaluations[0], run.evaluations.at(-1)];
    const known = run.evaluations.filter((each) => each.success !== null);
    const lines = [
      { x: run.rollouts[0], y: run.rollouts[1], colour: "engine", faint: known.length > 1 },
      { x: known.map((each) => each.step), y: known.map((each) => each.success), colour: "good" },
    ];
    const about = last ? `Held-out success: first ${first.share}, last ${last.share}` : "Success of the rollouts";
    return h("tr", {}, h("td", {}, box), h("td", { class: "name" }, h("a", { href: toRun(run.name) }, run.name)), h("td", {}, badge(run)),
      h("td", {}, `${run.step}${run.steps ? ` of ${run.steps}` : ""}`), h("td", {}, sparkline(lines, about)), h("td", {}, success(last)),
      h("td", {}, run.recipe), h("td", {}, run.route));
  }

  function draw() {
    const wanted = filter.value.toLowerCase();
    const fit = answer.runs.filter((run) => `${run.name} ${run.recipe} ${run.route} ${run.techniques}`.toLowerCase().includes(wanted));
    const now = JSON.stringify([wanted, fit]);
    if (now === shown) return;
    shown = now;
    const focus = document.activeElement?.getAttribute?.("aria-label");
    replace(body, fit.map(row));
    if (focus && !document.activeElement?.closest?.("main")) [...body.querySelectorAll("[aria-label]")].find((each) => each.getAttribute("aria-label") === focus)?.focus();
    note.textContent = answer.runs.length ? `${fit.length} of ${answer.runs.length} runs in ${answer.folder}` : `No runs in ${answer.folder} yet. A run begins with \`unstale train\`.`;
  }

  async function load() {
    try {
      answer = await ask("runs");
      replace(trouble, answer.problem ? problem(answer.problem) : null);
      draw();
    } catch (error) {
      if (!answer) failed(content, error);
    }
  }
  const close = follow(undefined, settled(300, load));
  load();
  return { close };
}
