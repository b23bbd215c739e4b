// Answers that were written into the page take the place of the server, with the functions of api.js.

export class Refused extends Error {}

const kept = JSON.parse(document.getElementById("data").textContent);
export const FROZEN = true;
export const RUN = kept.run.name;
export const ELSEWHERE = kept.elsewhere;

export const hasEpisode = (number) => String(number) in kept.episodes;

// The values of some metrics. Metrics that were recorded at the same steps share a list of them.
function series(names, window) {
  const found = window > 1 ? kept.means : kept.series;
  const both = (name) => [kept.steps[found[name]?.[0]] ?? [], found[name]?.[1] ?? []];
  return { series: Object.fromEntries(names.map((name) => [name, both(name)])), at: [] };
}

// The newest answer that has the whole range of time, or that of the whole run.
function spans({ start = -Infinity, end = Infinity }) {
  return kept.spans.findLast((each) => each.start <= start && end <= each.end) ?? kept.spans[0];
}

export async function ask(name, params = {}) {
  if (name === "series") return series([params.name].flat(), params.window);
  if (name === "spans") return spans(params);
  const answer = name === "episode" ? kept.episodes[params.episode] : kept[name];
  if (!answer || Number(params.start) > 0) throw new Refused(ELSEWHERE);
  return answer;
}

export const askUntil = (name, params) => ask(name, params);
export const askSeries = async (run, names, { window }) => series(names, window);
export const follow = () => () => {};
