// The pages of a run whose answers were written into one file (dashboard/frozen.py).

import { ELSEWHERE, RUN } from "./frozen.js";
import { audit } from "./audit.js";
import { h } from "./dom.js";
import { episode } from "./episode.js";
import { toRun } from "./parts.js";
import { start } from "./router.js";
import { run } from "./run.js";

const base = toRun(RUN);
const ofRun = () => [[RUN, base]];
const ofEpisode = (at) => [...ofRun(), [`episode ${at.episode}`, `${base}/episode/${at.episode}`]];

if (!location.hash) location.replace(base);
start([
  ["run/:run", run, ofRun],
  ["run/:run/audit", audit, () => [...ofRun(), ["audit", `${base}/audit`]]],
  ["run/:run/episode/:episode", episode, ofEpisode],
  ["run/:run/episode/:episode/token/:token", episode, ofEpisode],
], () => [h("h1", {}, "This is not in the report"), h("p", {}, ELSEWHERE), h("p", {}, h("a", { href: base }, RUN))]);
