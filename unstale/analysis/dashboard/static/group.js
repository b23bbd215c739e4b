// The siblings of a group side by side, each with the first token in which it differs from one that
// finished.

import { askUntil } from "./api.js";
import { h, replace } from "./dom.js";
import { amount, whole } from "./format.js";
import { cell, failed, problem, toRun } from "./parts.js";
import { KIND, MODES, contextOf, flat, modesOf, tokenElement, turnsOf } from "./tokens.js";

export function group(content, at) {
  replace(content, h("p", { class: "quiet", role: "status" }, `Reading group ${at.group}…`));
  let mode = "version";
  let skip = true;

  function sibling(member, found, context) {
    const link = `${toRun(at.run)}/episode/${member.episode}`;
    const head = h("div", { class: "bar" }, h("h2", {}, h("a", { href: link }, `episode ${member.episode}`)), h("span", { class: `badge ${member.success ? "good" : member.success === 0 ? "bad" : ""}` }, member.reward === undefined ? member.outcome : `reward ${amount(member.reward)}`));
    const facts = ["outcome", "stop", "turns", "sampled_tokens", "lag_max"].filter((name) => member[name] !== undefined).map((name) => `${name.replace("_", " ")} ${cell(name, member[name])}`).join(" · ");
    const about = [h("p", { class: "quiet" }, `sibling ${member.sibling}${member.role ? `, ${member.role}` : member.is_branch ? ", a branch" : ""} · ${facts}`), h("p", { class: "quiet" }, member.advantage === undefined ? null : `advantage ${amount(member.advantage)}`)];
    if (!member.pieces) return h("article", { class: "card" }, head, about, problem(member.problem));
    const all = flat(member);
    const around = windowOf(member);
    const shown = all.slice(skip ? Math.max(0, found.common_tokens - 8) : 0);
    const differs = member.first_difference;
    const chat = (tokens) => turnsOf(tokens).map((turn) => h("div", { class: `turn ${KIND[turn.role] || "tool"}` }, h("span", { class: "who" }, turn.role), h("div", { class: "words" }, turn.tokens.map((token) => {
      const element = tokenElement(token, MODES[mode].kind(token, context), token.at === differs ? "differs" : "");
      return token.at === differs ? [h("span", { class: "interruption", title: `The first token that differs from episode ${found.compared_with}` }, "≠"), h("a", { href: `${link}/token/${token.at}`, "aria-label": `First difference, token ${token.at}` }, element)] : element;
    }))));
    const gap = shown.length && around.length && around[0].at > all.length ? h("p", { class: "quiet" }, `tokens ${whole(all.length)} to ${whole(around[0].at - 1)} are left out`) : null;
    const left = member.num_tokens - all.length - around.length;
    const more = left > 0 ? h("p", { class: "quiet" }, `${whole(left)} more tokens: `, h("a", { href: link }, "the whole episode")) : null;
    return h("article", { class: "card sibling" }, head, about, h("p", { class: "quiet" }, place(member, found)), h("div", { class: "chat tokens" }, chat(shown), gap, chat(around)), more);
  }

  // The tokens around a difference that lies after the first tokens.
  const windowOf = (member) => (member.window ? flat({ ...member, pieces: member.window.pieces }) : []);

  // Where an episode departs from the one that all are compared with.
  function place(member, found) {
    const other = `episode ${found.compared_with}`;
    const differs = member.first_difference;
    if (!member.num_tokens) return "no tokens";
    if (member.episode === found.compared_with) return "the others are compared with this episode";
    if (differs === null) return `equal to ${other}`;
    return differs >= member.num_tokens ? `ends at token ${whole(differs)}, where ${other} continues` : `differs from ${other} at token ${whole(differs)}`;
  }

  function draw(found) {
    const all = found.members.flatMap((member) => (member.pieces ? [...flat(member), ...windowOf(member)] : []));
    const context = contextOf(all);
    const select = h("select", { id: "colour", onchange: () => ((mode = select.value), draw(found)) }, modesOf(all).map((name) => h("option", { value: name, selected: name === mode }, MODES[name].name)));
    const box = h("input", { type: "checkbox", id: "skip", checked: skip, onchange: () => ((skip = box.checked), draw(found)) });
    const rewards = found.members.filter((member) => !member.is_branch).map((member) => member.reward).filter((reward) => reward !== undefined);
    const mean = rewards.reduce((sum, reward) => sum + reward, 0) / (rewards.length || 1);
    const missing = found.num_episodes > found.members.length ? `, the first ${found.members.length} of ${found.num_episodes} episodes` : "";
    replace(content, h("h1", {}, `Group ${found.group_number}`), h("p", { class: "quiet" }, `${found.task}${missing} · mean reward ${amount(mean)}`),
      h("div", { class: "bar tools" }, h("label", { for: "colour" }, "colour by"), select, h("label", {}, box, ` leave out the ${whole(Math.max(0, found.common_tokens - 8))} tokens that all share`)),
      h("div", { class: "siblings" }, found.members.map((member) => sibling(member, found, context))));
  }

  let over = false;
  const wait = (text) => replace(content, h("p", { class: "quiet", role: "status" }, text));
  askUntil("group", { run: at.run, group: at.group }, wait, () => over).then((found) => over || draw(found), (error) => over || failed(content, error));
  return { close: () => (over = true) };
}
