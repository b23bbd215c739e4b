// Tokens as coloured text: what each colour means, and the turns of a conversation.

import { h } from "./dom.js";
import { NONE, amount, percent } from "./format.js";
import { OUTCOMES, outcomeText } from "./outcomes.js";

// Return the tokens of an answer of the server, one object for each.
export function flat(episode) {
  return episode.pieces.flatMap((piece, number) =>
    piece.ids.map((id, index) => ({
      at: piece.start + index, id, text: episode.has_texts ? piece.texts[index] : `${id} `, piece, number, turn: piece.turn,
      sampled: piece.version !== undefined, version: piece.version, lag: piece.lag ?? undefined, provenance: piece.provenance,
      behavior_logp: piece.behavior_logp?.[index], placed: piece.placed, source_version: piece.source_version, source_logp: piece.source_logp?.[index],
      trained: piece.trained ? Object.fromEntries(Object.entries(piece.trained).map(([name, values]) => [name, values[index]])) : undefined,
    })));
}

const bins = (limits, value) => limits.filter((limit) => value >= limit).length;
const signed = (limits) => (value) => {
  const size = bins(limits, Math.abs(value));
  return size ? `${value < 0 ? "low" : "high"}-${size}` : "none";
};
const PROBABILITIES = [0.1054, 0.6931, 2.3026, 4.6052, 6.9078];
const RATIOS = [0.005, 0.02, 0.1, 0.3, 0.7];
const ENTROPIES = [0.05, 0.2, 0.5, 1, 2];
const ADVANTAGES = [1e-9, 0.5, 1, 1.5, 2];
const isNumber = (value) => typeof value === "number";
const fixed = (keys) => () => keys;
// Six colours, each with four kinds of underline.
const versionKind = (index) => `version-${index % 6} t-round-${Math.floor(index / 6) % 4}`;
const RATIO_KEYS = [...[...RATIOS].reverse().map((limit, index) => [`low-${RATIOS.length - index}`, `≤ −${limit}`]), ["none", `within ±${RATIOS[0]}`], ...RATIOS.map((limit, index) => [`high-${index + 1}`, `≥ ${limit}`])];
const ratios = (read) => ({
  trained: true, keys: fixed(RATIO_KEYS),
  kind: (token) => {
    const value = token.trained && read(token.trained);
    return isNumber(value) ? signed(RATIOS)(value) : undefined;
  },
});

// Ways to colour. `kind(token)` returns the end of a CSS class, or nothing; `keys(tokens)` returns
// the legend as [kind, text].
export const MODES = {
  version: {
    name: "version", about: "the version of the policy that sampled the token",
    kind: (token, { versions }) => (token.sampled ? versionKind(versions.indexOf(token.version)) : undefined),
    keys: (tokens, { versions }) => versions.map((version, index) => [versionKind(index), `version ${version}`]),
  },
  lag: {
    name: "lag", about: "versions published between sampling and training",
    kind: (token) => (token.lag === undefined ? undefined : `lag-${Math.min(token.lag, 5)}`),
    keys: (tokens) => [...new Set(tokens.map((token) => token.lag).filter((lag) => lag !== undefined))].sort((a, b) => a - b).map((lag) => [`lag-${Math.min(lag, 5)}`, `lag ${lag}`]),
    missing: "The episode was not trained on, so its tokens have no lag.",
  },
  behavior_logp: {
    name: "behavior_logp", about: "how improbable the token was for the policy that sampled it",
    kind: (token) => (token.behavior_logp === undefined ? undefined : `seq-${bins(PROBABILITIES, -token.behavior_logp)}`),
    keys: fixed([["seq-0", "above 90%"], ["seq-1", "50 to 90%"], ["seq-2", "10 to 50%"], ["seq-3", "1 to 10%"], ["seq-4", "0.1 to 1%"], ["seq-5", "below 0.1%"]]),
  },
  provenance: {
    name: "provenance", about: "where the token came from",
    kind: (token) => `from-${token.provenance}`,
    keys: (tokens) => [...new Set(tokens.map((token) => token.provenance))].map((name) => [`from-${name}`, name]),
  },
  log_d: { name: "log D", about: "old_logp − behavior_logp, the discrepancy, in nats", ...ratios((values) => values.log_d) },
  log_s: { name: "log S", about: "logp − old_logp, the staleness, in nats", ...ratios((values) => values.log_s) },
  log_ratio: { name: "log D + log S", about: "logp − behavior_logp, in nats", ...ratios((values) => (isNumber(values.log_d) && isNumber(values.log_s) ? values.log_d + values.log_s : null)) },
  outcome: {
    name: "kept or clipped", about: "what happened to the token in training", trained: true,
    kind: (token) => (token.trained ? `out-${token.trained.outcome}` : undefined),
    keys: (tokens) => OUTCOMES.filter((name) => tokens.some((token) => token.trained?.outcome === name)).map((name) => [`out-${name}`, outcomeText(name)]),
  },
  weight: {
    name: "weight of the correction", about: "factor of the loss by the correction", trained: true,
    kind: (token) => (isNumber(token.trained?.weight) ? (token.trained.weight === 0 ? "low-5" : token.trained.weight === 1 ? "none" : signed(RATIOS)(Math.log(token.trained.weight))) : undefined),
    keys: fixed([["low-5", "0 to 0.5"], ["low-4", "0.5 to 0.74"], ["low-3", "0.74 to 0.9"], ["low-2", "0.9 to 0.98"], ["low-1", "0.98 to 0.995"], ["none", "1, within 0.5%"], ["high-1", "1.005 to 1.02"], ["high-2", "1.02 to 1.11"], ["high-3", "1.11 to 1.35"], ["high-4", "1.35 to 2"], ["high-5", "above 2"]]),
  },
  advantage: {
    name: "advantage", about: "tokens above 0 are made more probable, those below 0 less", trained: true,
    kind: (token) => (isNumber(token.trained?.advantage) ? signed(ADVANTAGES)(token.trained.advantage) : undefined),
    keys: fixed([["low-5", "below −2"], ["low-4", "−2 to −1.5"], ["low-3", "−1.5 to −1"], ["low-2", "−1 to −0.5"], ["low-1", "−0.5 to 0"], ["none", "0"], ["high-1", "0 to 0.5"], ["high-2", "0.5 to 1"], ["high-3", "1 to 1.5"], ["high-4", "1.5 to 2"], ["high-5", "above 2"]]),
  },
  entropy: {
    name: "entropy", about: "of the policy at the token, in nats; computed for some tokens", trained: true,
    kind: (token) => (isNumber(token.trained?.entropy) ? `seq-${bins(ENTROPIES, token.trained.entropy)}` : undefined),
    keys: fixed([["seq-0", "below 0.05"], ["seq-1", "0.05 to 0.2"], ["seq-2", "0.2 to 0.5"], ["seq-3", "0.5 to 1"], ["seq-4", "1 to 2"], ["seq-5", "above 2"]]),
  },
  exact: {
    name: "exact", about: "if old_logp was computed with the version that sampled the token", trained: true,
    kind: (token) => (token.trained ? (token.trained.exact ? "out-kept" : "out-masked") : undefined),
    keys: fixed([["out-kept", "exact"], ["out-masked", "approximated"]]),
  },
};

// Colours that an episode has values for.
export const modesOf = (tokens) => Object.keys(MODES).filter((mode) => !MODES[mode].trained || tokens.some((token) => token.trained));

export const contextOf = (tokens) => ({ versions: [...new Set(tokens.filter((token) => token.sampled).map((token) => token.version))].sort((a, b) => a - b) });

// Return the turns: messages of the context, and replies of the policy. A message begins at a
// mark of the ChatML format; other templates give one turn between two replies.
export function turnsOf(tokens) {
  const turns = [];
  let turn = null;
  let open = false;
  tokens.forEach((token, index) => {
    const isMark = !token.sampled && token.text.startsWith("<|im_start|>");
    const begins = !turn || isMark || token.sampled !== turn.sampled;
    if (begins) {
      turn = { role: token.sampled ? "agent" : turn || !isMark ? "environment" : "context", sampled: token.sampled, tokens: [] };
      open = isMark;
      turns.push(turn);
    }
    turn.tokens.push(token);
    if (open && !token.sampled) {
      const text = turn.tokens.map((each) => each.text).join("").slice("<|im_start|>".length);
      const role = /^([a-z_]{1,16})\n/.exec(text);
      if (role) [turn.role, open] = [role[1] === "assistant" ? "agent" : role[1], false];
      if (text.length > 24) open = false;
    }
    if (index + 1 === tokens.length && open) turn.role = "environment";
  });
  // The template writes the beginning of a reply before the policy does.
  const joined = [];
  for (const each of turns) {
    const before = joined.at(-1);
    if (each.sampled && before?.role === "agent" && !before.sampled) Object.assign(before, { sampled: true, tokens: [...before.tokens, ...each.tokens] });
    else joined.push(each);
  }
  return joined.filter((each) => each.tokens.some((token) => token.text.trim()) || each.sampled).map((each) => {
    const text = each.tokens.map((token) => token.text).join("");
    return { ...each, role: !each.sampled && text.includes("<tool_response>") ? "tool" : each.role };
  });
}

// Return the element of one token. Line breaks and other invisible texts get a mark.
export function tokenElement(token, kind, extra = "") {
  const marks = [token.sampled ? "sampled" : "", kind ? `t-${kind}` : "", /^\s*\n/.test(token.text) && !token.text.trim() ? "nl" : "", /^<\|.*\|>$/.test(token.text) ? "special" : "", extra];
  return h("span", { class: `t ${marks.filter(Boolean).join(" ")}`, "data-at": token.at }, token.text);
}

export const KIND = { system: "system", user: "user", agent: "assistant", tool: "tool" };

const between = (low, high) => [low === null ? "" : `from ${amount(low)}`, high === null ? "" : `to ${amount(high)}`].filter(Boolean).join(" ");

// The rows of the limits on D, S and D S, as the server sent them.
function limitRows(limits, outside) {
  return limits.map(({ name, low, high, about, unit }, index) => {
    const whole = unit === "token" ? "" : `, of the whole ${unit}`;
    const side = isOutside(outside[index]);
    return [name, between(low, high), `${about}${whole}${side}`];
  });
}
const isOutside = (is) => (is === null ? "" : is ? "; the token is outside" : "; the token is inside");

// The numbers of a token as [name, value, explanation]. `training` is that of the server's answer.
export function numbersOf(token, training) {
  const rows = [
    ["token", `${token.at}`, "its place in the episode"], ["id", `${token.id}`, "in the vocabulary"],
    ["provenance", token.provenance, "where it came from"],
  ];
  if (token.placed) rows.push(["placed text", `turn ${token.turn}`, "of a reply, but the policy did not sample it here"]);
  if (token.source_logp !== undefined) {
    rows.push(["source", `${token.source_version}`, "version of the policy that sampled it in another context"],
      ["source_logp", exactly(token.source_logp), `the engine, when it sampled: ${percent(Math.exp(token.source_logp), 2)}`]);
  }
  if (!token.sampled) return rows;
  rows.push(["turn", `${token.turn}`, "reply of the policy"], ["version", `${token.version}`, "of the policy that sampled it"],
    ["lag", token.lag === undefined ? NONE : `${token.lag}`, "versions published until it was trained on"],
    ["behavior_logp", exactly(token.behavior_logp), `the engine, when it sampled: ${percent(Math.exp(token.behavior_logp), 2)}`]);
  if (!token.trained) return rows;
  const { old_logp, logp, log_d, log_s, advantage, entropy, weight, exact, outcome, outside, gradient, formula } = token.trained;
  const row = (name, value, about) => rows.push([name, isNumber(value) ? exactly(value) : NONE, isNumber(value) ? about : "was not computed"]);
  row("old_logp", old_logp, exact ? "exact" : "approximated by the route");
  row("logp", logp, "the trainer, when it trained");
  row("log D", log_d, ratio("D", log_d));
  row("log S", log_s, ratio("S", log_s));
  const both = isNumber(log_d) && isNumber(log_s) ? log_d + log_s : null;
  row("log D + log S", both, ratio("D × S", both));
  rows.push(...limitRows(training.limits, outside));
  row("advantage", advantage, "in the loss");
  row("weight of the correction", weight, "from D");
  if (isNumber(gradient)) rows.push(["gradient weight", gradient ? exactly(gradient) : "0", training.formulas[formula]]);
  row("entropy", entropy, "nats");
  rows.push(["outcome", outcomeText(outcome), ""]);
  return rows;
}

const exactly = (value) => (isNumber(value) ? (Math.abs(value) >= 1e-4 || !value ? value.toFixed(5) : value.toExponential(2)) : NONE);
const ratio = (name, value) => (isNumber(value) ? `${name} = ${amount(Math.exp(value))}` : "");
