// One episode, token by token. The address of a token is #/run/<name>/episode/<id>/token/<n>.
// With ?step=<n> the values are those of a later training of a replayed episode.

import { FROZEN, askUntil } from "./api.js";
import { h, replace } from "./dom.js";
import { amount, whole } from "./format.js";
import { cell, failed, problem, toEpisode, toRun } from "./parts.js";
import { KIND, MODES, contextOf, flat, modesOf, numbersOf, tokenElement, turnsOf } from "./tokens.js";

const PART = 4000;

export function episode(content, at, query) {
  const base = `${toRun(at.run)}/episode/${at.episode}`;
  let found = null;
  let tokens = [];
  let elements = new Map();
  let selected = at.token === undefined ? null : Number(at.token);
  let mode = query.get("colour") || "version";
  let step = query.get("step");
  let start = 0;
  let over = false;
  let turn = 0;
  const panel = h("aside", { class: "panel", "aria-label": "Selected token" });
  const numbers = h("div", { "aria-live": "polite" });
  const legend = h("div", { class: "legend", "aria-label": "Colours" });
  const colours = h("select", { id: "colour", onchange: () => ((mode = colours.value), keep(), draw()) });
  const chat = h("div", { class: "chat tokens", tabindex: "0", role: "group", "aria-label": "Conversation. Left and right arrow keys select a token, Home and End the first and last one, [ and ] another reply.",
    onclick: (event) => choose(event.target.closest?.("[data-at]")), onkeydown: key });
  replace(content, h("p", { class: "quiet", role: "status" }, `Reading episode ${at.episode}…`));

  function address(ofStep) {
    const params = new URLSearchParams([["colour", mode === "version" ? "" : mode], ["step", ofStep ?? ""]].filter(([, value]) => value));
    return `${base}${selected === null ? "" : `/token/${selected}`}${params.size ? `?${params}` : ""}`;
  }

  function keep() {
    history.replaceState(null, "", address(step));
  }

  function choose(element) {
    if (element) select(Number(element.dataset.at));
  }

  function select(place, scroll = false) {
    const token = tokens.find((each) => each.at === place);
    elements.get(selected)?.classList.remove("selected");
    if (!token) {
      const isAway = place >= 0 && place < found.num_tokens;
      replace(numbers, problem(isAway ? `Token ${place} is not among those shown.` : `There is no token ${place}: the episode has the tokens 0 to ${found.num_tokens - 1}.`));
      return;
    }
    selected = place;
    keep();
    const element = elements.get(place);
    element.classList.add("selected");
    if (scroll) element.scrollIntoView({ block: "center" });
    else element.scrollIntoView({ block: "nearest" });
    showNumbers(token);
  }

  function showNumbers(token) {
    replace(numbers, h("h2", {}, "Token ", h("code", {}, JSON.stringify(token.text))), h("table", {}, h("tbody", {}, numbersOf(token, found.training).map(([name, value, about]) =>
      h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, h("span", { class: "number" }, value), " ", h("small", { class: "quiet" }, about)))))));
  }

  function key(event) {
    const last = tokens.length - 1;
    const now = tokens.findIndex((each) => each.at === selected);
    const replies = tokens.map((each, index) => (each.sampled && !tokens[index - 1]?.sampled ? index : -1)).filter((index) => index >= 0);
    const places = {
      ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: last,
      "]": replies.find((index) => index > now) ?? now, "[": [...replies].reverse().find((index) => index < now) ?? now,
    };
    if (!(event.key in places) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const place = Math.min(last, Math.max(0, places[event.key]));
    if (tokens[place]) select(tokens[place].at);
  }

  function draw() {
    const context = contextOf(tokens);
    const way = MODES[mode];
    elements = new Map();
    const turns = turnsOf(tokens).map((turn) => {
      let before = null;
      const words = turn.tokens.flatMap((token) => {
        const element = tokenElement(token, way.kind(token, context), token.at === selected ? "selected" : "");
        elements.set(token.at, element);
        const cut = token.sampled && before !== null && before !== token.version;
        before = token.sampled ? token.version : before;
        return cut ? [h("span", { class: "interruption", title: "New weights were loaded in the middle of the reply" }, `v${token.version}`), element] : [element];
      });
      return h("div", { class: `turn ${KIND[turn.role] || "tool"}` }, h("span", { class: "who" }, turn.role), h("div", { class: "words" }, words));
    });
    replace(chat, turns);
    const keys = way.keys(tokens, context);
    replace(legend, keys.length ? keys.map(([kind, text]) => h("span", {}, h("i", { class: `t sampled t-${kind}` }, "abc"), text)) : h("span", {}, way.missing || "No token has a value."));
  }

  function header() {
    const facts = [["task", found.task], ["outcome", found.outcome], ["stop", found.stop], ["reward", found.reward], ["success", found.success], ["step", found.step], ["lag, max", found.lag_max], ["advantage", found.advantage], ["|log D|, max", found.log_d_abs_max], ["|log S|, max", found.log_s_abs_max], ["dropped", found.dropped_tokens], ["clipped", found.clipped_tokens], ["turns", found.turns], ["sampled", found.sampled_tokens]];
    const figures = Object.entries(found.figures);
    const titled = (each) => `${each.role ?? "episode"} ${each.episode}`;
    const talk = (each) => (each.episode === found.episode ? h("b", {}, each.role ?? titled(each)) : FROZEN ? each.role ?? titled(each) : h("a", { href: `${toRun(at.run)}/episode/${each.episode}` }, titled(each)));
    const talks = found.conversations.length > 1 ? h("nav", { class: "quiet", "aria-label": "Conversations of the episode" }, "conversations: ", found.conversations.map((each, index) => [index ? " · " : "", talk(each)])) : null;
    return [
      h("div", { class: "bar" }, h("h1", {}, `Episode ${found.episode}`), h("span", { class: `badge ${found.success ? "good" : found.success === 0 ? "bad" : ""}` }, found.success === undefined ? found.outcome : found.success ? "success" : "no success"), found.role ? h("span", { class: "badge" }, found.role) : null, FROZEN ? null : h("a", { class: "go", href: `${toRun(at.run)}/group/${found.group_number}` }, `group ${found.group_number}, sibling ${found.sibling}`),
        found.fork ? h("span", { class: "quiet" }, `forked after ${found.fork.at} tokens of `, FROZEN ? `episode ${found.fork.parent}` : toEpisode(at.run, found.fork.parent)) : null),
      talks,
      h("dl", { class: "facts" }, facts.filter(([, value]) => value !== undefined).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, cell(name, value))))),
      figures.length ? h("p", { class: "quiet" }, figures.map(([name, value]) => `${name} ${amount(value)}`).join(" · ")) : null,
      found.note ? problem(found.note) : null,
      found.has_texts ? null : problem("tokenizer.json cannot be read, so tokens are shown by their numbers."),
    ];
  }

  function pager() {
    if (FROZEN) return found.end < found.num_tokens ? h("p", { class: "quiet" }, `The first ${whole(found.end)} of ${whole(found.num_tokens)} tokens are in this report.`) : null;
    if (found.num_tokens <= PART) return null;
    const go = (text, label, to) => h("button", { type: "button", "aria-label": label, disabled: to < 0 || to >= found.num_tokens, onclick: () => load(to) }, text);
    return h("nav", { class: "bar pager", "aria-label": "Parts of the episode" }, go("◂", "Part before", start - PART), h("span", { class: "quiet" }, `tokens ${whole(start)} to ${whole(found.end)} of ${whole(found.num_tokens)}`), go("▸", "Next part", start + PART));
  }

  async function load(from) {
    const mine = (turn += 1);
    start = from;
    let answer;
    try {
      answer = await askUntil("episode", { run: at.run, episode: at.episode, start, limit: PART, step }, (text) => replace(content, h("p", { class: "quiet", role: "status" }, text)), () => over || mine !== turn);
    } catch (error) {
      if (!over && mine === turn) failed(content, error);
      return;
    }
    if (over || mine !== turn) return;
    found = answer;
    tokens = flat(found);
    const modes = modesOf(tokens);
    if (!modes.includes(mode)) mode = "version";
    replace(colours, modes.map((name) => h("option", { value: name, selected: name === mode }, MODES[name].name)));
    const training = found.training;
    const others = training?.steps.filter((each) => each !== training.step) ?? [];
    // The address has what is selected at the click.
    const link = (each, index) => [index ? ", " : " ", h("a", { href: address(each), onclick: (event) => void (event.currentTarget.href = address(each)) }, each)];
    const text = !training ? "The journal has no values of this episode's training (journal.token_share), so log D, log S and the advantage are not shown."
      : training.not_run ? `In the batch of step ${training.step}, without a gradient: ${training.not_run}. It counts in the mean of the loss, and no pass was run on it.`
      : `Trained in step ${training.step} with old_logp of the route ${training.route}.`;
    const note = h("p", { class: "quiet" }, text, others.length ? [" It was also trained on in step", others.map(link), "."] : null);
    replace(panel, numbers, note, training?.problem ? problem(`The limits are not known: ${training.problem}`) : null);
    replace(numbers, h("p", { class: "quiet" }, "Choose a token to see its numbers."));
    replace(content, header(), h("div", { class: "bar tools" }, h("label", { for: "colour" }, "colour by"), colours), legend, pager(), h("div", { class: "reading" }, h("div", { class: "conversation" }, chat), panel), pager());
    draw();
    if (selected !== null) select(selected, true);
  }

  const partOf = (place) => (Number.isInteger(place) && place > 0 ? Math.floor(place / PART) * PART : 0);
  load(partOf(selected));
  return {
    close: () => (over = true),
    moved(now, parameters) {
      const wanted = parameters.get("colour") || mode;
      if (wanted !== mode && modesOf(tokens).includes(wanted)) {
        mode = colours.value = wanted;
        draw();
      }
      const place = now.token === undefined ? null : Number(now.token);
      if (parameters.get("step") !== step) {
        step = parameters.get("step");
        mode = wanted;
        selected = place;
        load(partOf(place));
        return;
      }
      if (place === null) return;
      if (tokens.some((token) => token.at === place)) select(place, true);
      else {
        selected = place;
        load(partOf(place));
      }
    },
  };
}
