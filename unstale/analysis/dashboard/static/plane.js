// The trained tokens of a run in the plane of log D and log S, on the page of the run.

import { FROZEN, ask, hasEpisode } from "./api.js";
import { card } from "./details.js";
import { h, replace } from "./dom.js";
import { whole } from "./format.js";
import { problem, toRun } from "./parts.js";
import { Scatter } from "./scatter.js";
import { whileInView } from "./view.js";

const POINTS = 800;
const PAUSE_MS = 10_000;
const REST = 60;
const NO_VALUES = "The journal has no values of trained tokens (journal.token_share, --journal.token_share 1 keeps all).";

export function tokenPlane(run) {
  const note = h("p", { class: "quiet", role: "status" });
  const toFactors = (limits) => (location.hash = `${toRun(run)}/factors?${new URLSearchParams(limits)}`);
  const scatter = new Scatter({
    onBrush: (limits) => (FROZEN ? scatter.draw() : toFactors(limits)),
    onChoose: (episode, token, step) => hasEpisode(episode) && (location.hash = `${toRun(run)}/episode/${episode}/token/${token}?step=${step}`),
    hint: FROZEN ? "" : "Drag over tokens to select them.",
  });
  const about = "Each point is a trained token; the shading counts all. Above and at the right: how often each value occurs, by lag, with logarithmic heights. Lines are the limits of the run.";
  const element = card("log D against log S, token by token", about, note, scatter.element);

  async function load() {
    try {
      const found = await ask("factors", { run, points: POINTS });
      const shown = found.points.log_d.length;
      const sample = shown < found.placed ? `; points show ${whole(shown)} of them` : "";
      const limits = [...new Set(found.lines.map((line) => line.text))].join(" ");
      replace(note, found.placed ? `${whole(found.placed)} of ${whole(found.total)} tokens have a log D and a log S${sample}. ${limits}` : NO_VALUES, found.problem ? problem(found.problem) : null);
      scatter.element.hidden = !found.placed;
      if (found.placed) scatter.set(found, {});
    } catch (error) {
      replace(note, problem(error.message));
    }
  }
  const viewed = whileInView([element], load, { pause: PAUSE_MS, rest: REST });
  return { element, refresh: viewed.refresh, close: () => { viewed.close(); scatter.remove(); } };
}
