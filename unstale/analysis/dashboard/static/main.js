// The pages of the dashboard.

import { audit } from "./audit.js";
import { compare } from "./compare.js";
import { h } from "./dom.js";
import { episode } from "./episode.js";
import { episodes } from "./episodes.js";
import { factors } from "./factors.js";
import { group } from "./group.js";
import { toRun } from "./parts.js";
import { start } from "./router.js";
import { run } from "./run.js";
import { runs } from "./runs.js";

const ofRun = (at) => [[at.run, toRun(at.run)]];
const ofEpisodes = (at) => [...ofRun(at), ["episodes", `${toRun(at.run)}/episodes`]];
const ofEpisode = (at) => [...ofEpisodes(at), [`episode ${at.episode}`, `${toRun(at.run)}/episode/${at.episode}`]];

start([
  ["", runs, () => []],
  ["compare", compare, () => [["compare", "#/compare"]]],
  ["run/:run", run, ofRun],
  ["run/:run/audit", audit, (at) => [...ofRun(at), ["audit", `${toRun(at.run)}/audit`]]],
  ["run/:run/episodes", episodes, ofEpisodes],
  ["run/:run/factors", factors, (at) => [...ofRun(at), ["D against S", `${toRun(at.run)}/factors`]]],
  ["run/:run/group/:group", group, (at) => [...ofEpisodes(at), [`group ${at.group}`, `${toRun(at.run)}/group/${at.group}`]]],
  ["run/:run/episode/:episode", episode, ofEpisode],
  ["run/:run/episode/:episode/token/:token", episode, ofEpisode],
], () => [h("h1", {}, "There is no such page"), h("p", {}, h("a", { href: "#/" }, "All runs"))]);
