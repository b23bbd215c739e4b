// What another route or other limits would have kept and clipped on the same tokens.

import { ask } from "./api.js";
import { h, replace, scrolling } from "./dom.js";
import { downloads } from "./download.js";
import { NONE, amount, percent, whole } from "./format.js";
import { lagName } from "./lags.js";
import { outcomeWord } from "./outcomes.js";
import { problem, toRun } from "./parts.js";

const GROUPS = [["kept", ["kept"]], ["dropped", ["vetoed", "masked", "dropped"]], ["clipped low", ["clipped_low"]], ["clipped high", ["clipped_high"]], ["capped", ["capped"]]];
const SELECTORS = { correction: "correction.mode", objective: "objective.loss_type", old_logps: "old_logps.route" };
const ROUTE = "old_logps.route";

const sum = (counts, names) => names.reduce((total, name) => total + (counts[name] || 0), 0);
const add = (rows, side) => rows.reduce((total, row) => {
  for (const [name, count] of Object.entries(row[side])) total[name] = (total[name] || 0) + count;
  return total;
}, {});

// `changes` are the changed options of the address, `getChoice` returns the filter of the page,
// `onChange` keeps them in the address, `onLines` gets the limits to draw.
export class Alternative {
  constructor(run, { changes, getChoice, onChange, onLines }) {
    Object.assign(this, { run, changes, getChoice, onChange, onLines, about: null, turn: 0, parquetProblem: "" });
    this.form = h("form", { class: "options", onsubmit: (event) => (event.preventDefault(), this.compute()) });
    this.result = h("div", { "aria-live": "polite" });
    this.element = h("section", { id: "alternative" }, h("h2", {}, "With other options"),
      h("p", { class: "lead" }, "What another route or other limits would have kept and clipped on the same tokens, computed by the trainer's own functions from the recorded values. The run would then have learnt something else, so later steps would have had other tokens."), this.form, this.result);
  }

  async load() {
    try {
      this.about = await ask("limits", { run: this.run });
    } catch (error) {
      replace(this.form, problem(error.message));
      return;
    }
    this.show();
    if (Object.keys(this.changes).length) await this.compute();
  }

  // The value of an option: the changed one, or that of the run.
  now(name) {
    if (name === ROUTE) return this.changes[name] ?? this.about.route;
    return this.changes[name] ?? this.about.options.find((option) => option.name === name).value;
  }

  set(name, value) {
    const own = name === ROUTE ? this.about.route : this.about.options.find((option) => option.name === name).value;
    if (value === own || value === "") delete this.changes[name];
    else this.changes[name] = value;
    if (name === ROUTE) for (const each of Object.keys(this.changes)) if (each.startsWith("old_logps.") && each !== ROUTE) delete this.changes[each];
    this.onChange();
    if (Object.values(SELECTORS).includes(name)) this.show(name);
  }

  isUsed({ name, readers }) {
    const section = name.split(".")[0];
    if (section === "old_logps" && this.now(ROUTE) === this.about.route && !this.about.computed) return false;
    return (section !== "old_logps" && !readers.length) || readers.includes(this.now(SELECTORS[section]));
  }

  show(focus) {
    const field = (name, about, words, label) => {
      const id = `option-${name}`;
      const changed = name in this.changes ? "changed" : undefined;
      const common = { id, class: changed, title: about, onchange: (event) => this.set(name, event.target.value.trim()) };
      const input = words.length
        ? h("select", common, words.map(([word, reason]) => h("option", { value: word, selected: word === this.now(name), disabled: Boolean(reason), title: reason || undefined }, word)))
        : h("input", { ...common, type: "text", value: this.now(name), spellcheck: "false", autocomplete: "off", placeholder: "default" });
      return h("div", {}, h("label", { for: id }, label), input);
    };
    const { options, routes, route } = this.about;
    const parts = Object.keys(SELECTORS).map((section) => {
      const shown = options.filter((option) => option.name.startsWith(`${section}.`) && this.isUsed(option));
      const fields = shown.map(({ name, words, about }) => field(name, about, words.map((word) => [word]), name.slice(section.length + 1)));
      if (section === "old_logps") fields.unshift(field(ROUTE, "Method by which old_logp is computed", Object.entries(routes), "route"));
      return h("fieldset", {}, h("legend", {}, section), fields);
    });
    const refused = Object.entries(routes).filter(([, reason]) => reason);
    replace(this.form, parts, h("div", { class: "bar" }, h("button", { type: "submit", class: "do" }, "Compute"), h("button", { type: "button", onclick: () => this.reset() }, "As in the run"), h("span", { class: "quiet" }, `The run used ${route}.`)),
      refused.length ? h("details", {}, h("summary", {}, `${refused.length} routes cannot be computed`), h("ul", {}, refused.map(([name, reason]) => h("li", {}, h("code", {}, name), ": ", reason)))) : null);
    if (focus) document.getElementById(`option-${focus}`)?.focus();
  }

  reset() {
    this.change({});
    this.onChange();
  }

  // Show other options, as an address has them.
  change(changes) {
    this.changes = changes;
    this.turn += 1;
    this.onLines([]);
    replace(this.result);
    if (!this.about) return;
    this.show();
    if (Object.keys(changes).length) this.compute();
  }

  // Take back an answer about tokens that are no longer chosen.
  outdate() {
    this.turn += 1;
    this.onLines([]);
    if (this.result.hasChildNodes()) replace(this.result, h("p", { class: "quiet" }, "Other tokens are chosen now. Compute again."));
  }

  async compute() {
    const mine = (this.turn += 1);
    replace(this.result, h("p", { class: "quiet", role: "status" }, "Computing…"));
    try {
      const asked = { run: this.run, ...this.getChoice(), ...this.changes };
      const found = await ask("alternative", asked);
      if (mine !== this.turn) return;
      this.onLines(Object.keys(this.changes).length ? found.lines : []);
      replace(this.result, this.answer(found, asked));
    } catch (error) {
      if (mine !== this.turn) return;
      this.onLines([]);
      replace(this.result, problem(error.message));
    }
  }

  answer(found, asked) {
    if (!found.compared) return [problem("None of the chosen tokens has the values that this needs."), this.notes(found)];
    const total = { lag: null, run: add(found.lags, "run"), other: add(found.lags, "other") };
    const shown = GROUPS.filter(([name, names]) => name === "kept" || sum(total.run, names) || sum(total.other, names));
    const count = (row, names) => {
      const [before, after] = [sum(row.run, names), sum(row.other, names)];
      return h("td", { class: before === after ? undefined : "differs-cell" }, whole(before), before === after ? null : [" → ", h("b", {}, whole(after))]);
    };
    const line = (row) => h("tr", {}, h("th", { scope: "row" }, row.lag === null ? "all lags" : lagName(row.lag)), h("td", {}, whole(sum(row.run, Object.keys(row.run)))), shown.map(([, names]) => count(row, names)));
    const ess = (value) => percent(value, 1);
    return [
      scrolling("Outcomes", h("table", { class: "results outcomes" }, h("caption", { class: "unseen" }, "Outcomes in the run and with the other options"), h("thead", {}, h("tr", {}, ["", "tokens", ...shown.map(([name]) => name)].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, found.lags.map(line), found.lags.length > 1 ? line(total) : null))),
      h("p", {}, `Effective sample size of the tokens with an advantage: ${ess(found.ess.run)} in the run, ${ess(found.ess.other)} with these options. The weight of a token is that of its gradient, divided by its advantage.`),
      this.notes(found),
      h("ul", { class: "meaning-lines" }, found.sentences.map((text) => h("li", {}, text))),
      this.changed(found, asked),
    ];
  }

  notes(found) {
    const notes = [
      found.read < found.total ? `Computed on ${whole(found.read)} of ${whole(found.total)} tokens, in groups that are evenly spaced over the steps. Choose fewer steps to compute all.` : "",
      found.stored ? "" : `The values of ${found.route} follow from the recorded ones.`,
      found.not_run ? `${whole(found.not_run)} tokens are of episodes that were not run, so their logp is not known.${found.not_run_dropped ? ` Of these, ${whole(found.not_run_dropped)} have an advantage: the correction had dropped their episodes, and other limits may keep them.` : " Their advantages are 0."}` : "",
      found.unknown ? `${whole(found.unknown)} tokens were left out: ${found.route} needs the weights at the start of the batch, or of the first training of a replayed token.` : "",
      found.rounding ? `With the run's own options, ${whole(found.rounding)} tokens come out otherwise than recorded, because log D and log S are rounded to float16.` : "",
    ];
    return notes.filter(Boolean).map((text) => h("p", { class: "quiet" }, text));
  }

  changed(found, asked) {
    if (!found.num_changes) return h("p", {}, "No token would have had another outcome.");
    const kinds = found.changes.map(([before, after, count]) => `${whole(count)} ${outcomeWord(before)} → ${outcomeWord(after)}`).join(", ");
    const rows = found.rows.map((row) => h("tr", {}, h("td", {}, h("a", { href: `${toRun(this.run)}/episode/${row.episode}/token/${row.token}?step=${row.step}` }, `episode ${row.episode}, token ${row.token}`)), h("td", {}, row.step), h("td", {}, row.lag), h("td", {}, amount(row.log_d)), h("td", {}, amount(row.log_s)), h("td", {}, `${outcomeWord(row.run)} → ${outcomeWord(row.other)}`)));
    const listed = found.rows.length < found.num_changes ? ` The ${whole(found.rows.length)} with the largest |log S| are listed.` : "";
    const all = found.read < found.total ? "all chosen tokens that differ" : `all ${whole(found.num_changes)}`;
    return [h("p", {}, h("b", {}, `${whole(found.num_changes)} of ${whole(found.compared)} tokens differ`), `: ${kinds || NONE}.${listed}`),
      h("div", { class: "scroll low" }, h("table", { class: "results" }, h("thead", {}, h("tr", {}, ["token", "step", "lag", "log D", "log S", "outcome"].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, rows))),
      h("p", {}, downloads(all, { ...asked, content: "changed" }, this.parquetProblem))];
  }
}
