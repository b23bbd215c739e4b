// D against S: the trained tokens of a run by their discrepancy and staleness.

import { ask, follow } from "./api.js";
import { h, replace } from "./dom.js";
import { amount, percent, whole } from "./format.js";
import { lagName } from "./lags.js";
import { outcomeWord } from "./outcomes.js";
import { problem, toRun } from "./parts.js";
import { Scatter } from "./scatter.js";

const CHOICE = ["step_min", "step_max", "lag_min", "lag_max", "exact"];
const BRUSH = ["d_min", "d_max", "s_min", "s_max"];
const NAMES = { step_min: "steps from", step_max: "to", lag_min: "lags from", lag_max: "to", d_min: "log D from", d_max: "to", s_min: "log S from", s_max: "to" };
const AGAIN_MS = 10_000;
const LABELS = { step_max: "last step", lag_max: "largest lag", d_max: "largest log D", s_max: "largest log S" };

// What was read, chosen and counted, in sentences.
function counts(found) {
  if (!found.total) return "The journal has no values of trained tokens (journal.token_share, --journal.token_share 1 keeps all).";
  const points = found.points.log_d.length;
  const parts = [
    found.read < found.total ? `${whole(found.read)} of ${whole(found.total)} recorded tokens were read, in groups that are evenly spaced over the steps; choose fewer steps to read all.` : `${whole(found.total)} tokens are recorded.`,
    found.chosen < found.read ? `${whole(found.chosen)} of them were chosen.` : "",
    `${whole(found.placed)} have a log D and a log S and are counted.`,
    found.without_s.tokens ? `${whole(found.without_s.tokens)} have a log D but no log S, of these ${whole(found.without_s.dropped)} dropped; they are counted along D alone.` : "",
    found.chosen > found.placed + found.without_s.tokens ? `${whole(found.chosen - found.placed - found.without_s.tokens)} have no log D.` : "",
    points < found.placed ? `Points show a sample of ${whole(points)}, with some of every shaded cell; ${whole(found.placed - points)} are in the shading alone.` : "Points show all of them.",
  ];
  return parts.filter(Boolean).join(" ");
}

// The figures of the selected tokens, and the episodes with most of them.
function selection(run, found) {
  const picked = found.selected;
  const share = picked.of ? ` (${percent(picked.tokens / picked.of, 2)})` : "";
  const lags = picked.by_lag.map(([lag, tokens]) => `${lagName(lag)}: ${whole(tokens)}`).join(", ");
  const outcomes = Object.entries(picked.outcomes).map(([name, tokens]) => `${whole(tokens)} ${outcomeWord(name)}`).join(", ");
  const token = (row) => `${toRun(run)}/episode/${row.episode}/token/${row.token}?colour=${Math.abs(row.log_d) > Math.abs(row.log_s) ? "log_d" : "log_s"}&step=${row.step}`;
  const rows = picked.rows.map((row) => h("tr", {}, h("td", {}, h("a", { href: `${toRun(run)}/episode/${row.episode}` }, `episode ${row.episode}`)), h("td", {}, row.step), h("td", {}, whole(row.tokens)), h("td", {}, h("a", { href: token(row) }, `token ${row.token}`)), h("td", {}, row.lag), h("td", {}, amount(row.log_d)), h("td", {}, amount(row.log_s))));
  const rest = picked.episodes > picked.rows.length ? ` The ${whole(picked.rows.length)} with most of them are listed.` : "";
  return [h("h2", {}, "Selected tokens"), h("p", {}, h("b", {}, `${whole(picked.tokens)} of ${whole(picked.of)} tokens`), share, picked.tokens ? `, in ${whole(picked.episodes)} episodes. ${lags}. ${outcomes}.${rest}` : "."),
    rows.length ? h("div", { class: "scroll low" }, h("table", { class: "results" }, h("thead", {}, h("tr", {}, ["episode", "step", "selected", "its farthest token", "lag", "log D", "log S"].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, rows))) : null];
}

export function factors(content, { run }, query) {
  let state = {};
  let turn = 0;
  let step = -1;
  let over = false;
  const read = (from) => (state = Object.fromEntries([...CHOICE, ...BRUSH].map((name) => [name, from.get(name) || ""])));
  read(query);
  const note = h("p", { class: "quiet", role: "status" }, "Reading the tokens…");
  const wrong = h("div");
  const inputs = Object.fromEntries([...CHOICE.slice(0, 4), ...BRUSH].map((name) => [name, h("input", { id: name, type: "text", value: state[name], spellcheck: "false", autocomplete: "off", "aria-label": LABELS[name], placeholder: "any", onchange: () => changed() })]));
  inputs.exact = h("select", { id: "exact", onchange: () => changed() }, [["", "all"], ["exact", "exact old_logp"], ["approximated", "approximated old_logp"]].map(([value, text]) => h("option", { value, selected: value === state.exact }, text)));
  const field = (name) => [h("label", { for: name }, NAMES[name]), inputs[name]];
  const scatter = new Scatter({
    hint: "The fields below choose a part of them.",
    onBrush: (limits) => {
      for (const name of BRUSH) inputs[name].value = limits[name];
      changed();
    },
    onChoose: (episode, token, at) => (location.hash = `${toRun(run)}/episode/${episode}/token/${token}?step=${at}`),
  });
  const meaning = h("ul", { class: "meaning-lines" });
  const beyond = h("div", { class: "bar" });
  const chosen = h("section", { id: "selected" });
  const clear = h("button", { type: "button", onclick: () => (BRUSH.forEach((name) => (inputs[name].value = "")), changed()) }, "clear");
  replace(content, h("h1", {}, "D against S"), h("p", { class: "lead" }, "Each point is a trained token: log D compares trainer and engine, log S compares the weights in training with those of old_logp. The shading counts all tokens."), note, wrong,
    h("div", { class: "bar tools limits" }, field("step_min"), field("step_max"), field("lag_min"), field("lag_max"), h("label", { for: "exact" }, "old_logp"), inputs.exact),
    h("figure", { class: "card" }, h("figcaption", {}, h("h3", {}, "Tokens by lag"), h("p", {}, "Drag over tokens to select them, or write limits below. Above and at the right: how often each value occurs, by lag, with logarithmic heights.")), scatter.element,
      h("div", { class: "bar tools limits" }, BRUSH.map(field), clear), beyond),
    meaning, chosen);

  const params = (names) => Object.fromEntries(names.map((name) => [name, state[name]]).filter(([, value]) => value !== ""));

  function keep() {
    const kept = new URLSearchParams(params([...CHOICE, ...BRUSH]));
    history.replaceState(null, "", `${toRun(run)}/factors${kept.size ? `?${kept}` : ""}`);
  }

  function changed() {
    for (const [name, input] of Object.entries(inputs)) state[name] = input.value.trim();
    keep();
    load();
  }

  function write() {
    for (const [name, input] of Object.entries(inputs)) input.value = state[name];
  }

  // Buttons that select what lies beyond a limit of the run.
  function shortcuts(lines) {
    const limits = lines.filter((line) => "ds".includes(line.on) && line.on.length === 1);
    replace(beyond, limits.length ? h("span", { class: "quiet" }, "beyond") : null, limits.map((line) => h("button", { type: "button", onclick: () => {
      BRUSH.forEach((name) => (inputs[name].value = ""));
      inputs[`${line.on}_${line.at < 0 ? "max" : "min"}`].value = Number(line.at.toPrecision(6));
      changed();
    } }, line.label)));
  }

  function selected(found) {
    const picked = found.selected;
    if (!picked) {
      replace(chosen);
      return;
    }
    replace(chosen, ...selection(run, found));
  }

  async function load() {
    const mine = (turn += 1);
    try {
      const found = await ask("factors", { run, ...params([...CHOICE, ...BRUSH]) });
      if (mine !== turn || over) return;
      note.textContent = counts(found);
      const limits = Object.fromEntries(Object.entries(params(BRUSH)).map(([name, value]) => [name, Number(value)]));
      scatter.set(found, limits);
      replace(wrong, found.problem ? problem(found.problem) : null);
      replace(meaning, found.sentences.map((text) => h("li", {}, text)));
      shortcuts(found.lines);
      selected(found);
    } catch (error) {
      if (mine !== turn || over) return;
      note.textContent = "";
      replace(wrong, problem(error.message));
    }
  }

  // The answer reads all tokens of the run, so a live run is read again after a pause.
  let timer = 0;
  let due = 0;
  function reload() {
    clearTimeout(timer);
    timer = setTimeout(() => {
      due = Date.now() + AGAIN_MS;
      load();
    }, Math.max(1500, due - Date.now()));
  }
  const close = follow(run, (progress) => {
    if (step >= 0 && progress.last_step !== step) reload();
    step = progress.last_step ?? step;
  });
  load();
  return {
    close: () => ((over = true), clearTimeout(timer), close(), scatter.remove()),
    moved(now, parameters) {
      read(parameters);
      write();
      load();
    },
  };
}
