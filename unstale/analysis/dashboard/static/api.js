// Ask the server. Every answer is JSON, and an error has a sentence. In a report, frozen.js takes the
// place of this module.

// True for a page that is one file, whose answers do not change. `hasEpisode` says which it shows.
export const FROZEN = false;
export const hasEpisode = () => true;

export class Refused extends Error {
  constructor(text, status = 0) {
    super(text);
    this.status = status;
  }
}

const AGAIN_MS = 1000;
const NOT_YET = 503;

// `params` may have a list, which becomes a repeated parameter.
export async function ask(name, params = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(params)) {
    for (const each of [value].flat()) if (each !== undefined && each !== null && each !== "") query.append(key, each);
  }
  let response;
  try {
    response = await fetch(`/api/${name}?${query}`, { cache: "no-store" });
  } catch {
    throw new Refused("the dashboard does not answer: is `unstale dashboard` still running?");
  }
  const answer = await response.json().catch(() => ({ error: `the answer has status ${response.status} and is not JSON` }));
  if (!response.ok) throw new Refused(answer.error || `status ${response.status}`, response.status);
  return answer;
}

// Metrics that an answer may have, as in summary.py.
const MOST = 24;
let waiting = new Map();

// Ask for the series of some metrics of a run. What the plots of a page ask for at one moment is
// asked together, because each request takes time of the server. With `window`, each value is the
// mean of the last few.
export function askSeries(run, names, { points, x, at = [], window }) {
  if (!waiting.size) queueMicrotask(send);
  const key = JSON.stringify({ run, points, x, at, window });
  if (!waiting.has(key)) waiting.set(key, []);
  return new Promise((resolve, reject) => waiting.get(key).push({ names, resolve, reject }));
}

function send() {
  const asked = waiting;
  waiting = new Map();
  for (const [key, questions] of asked) {
    const parts = [];
    for (const question of questions) {
      const part = parts.at(-1);
      if (part && part.names.length + question.names.length <= MOST) {
        part.names.push(...question.names);
        part.questions.push(question);
      } else parts.push({ names: [...question.names], questions: [question] });
    }
    for (const { names, questions } of parts) {
      ask("series", { ...JSON.parse(key), name: names }).then((answer) => questions.forEach(({ resolve }) => resolve(answer)), (error) => questions.forEach(({ reject }) => reject(error)));
    }
  }
}

// Ask for something that the index may not have yet. `onWait` gets the reason, until `isOver()`.
export async function askUntil(name, params, onWait, isOver) {
  for (;;) {
    try {
      return await ask(name, params);
    } catch (error) {
      if (error.status !== NOT_YET || isOver()) throw error;
      onWait(error.message);
      await new Promise((done) => setTimeout(done, AGAIN_MS));
    }
  }
}

const state = document.getElementById("link");

function show(text, kind) {
  state.textContent = text;
  state.className = `badge ${kind}`;
}

// Milliseconds between two updates of a page, unless the state of a run has changed. A page asks for
// much, and shares the processor with the training.
const UPDATE_MS = 5000;

// Follow a run, or all runs if `run` is undefined. Return a function that ends it. `episodes` is true
// if the page shows episodes, which are otherwise only counted.
// A hidden page is not followed, because a browser opens few connections to one server.
export function follow(run, onProgress, { episodes = false } = {}) {
  let source = null;
  let last = null;
  let timer = 0;
  let due = 0;
  const pass = (progress) => {
    clearTimeout(timer);
    due = Date.now() + UPDATE_MS;
    onProgress(progress, last);
    last = progress;
  };
  const isNew = (progress) => !last || ["runs", "state", "complete"].some((name) => progress[name] !== last[name]);
  const open = () => {
    if (source || document.hidden) return;
    source = new EventSource(run === undefined ? "/api/stream" : `/api/stream?run=${encodeURIComponent(run)}${episodes ? "&episodes=1" : ""}`);
    source.addEventListener("open", () => show("connected", "good"));
    source.addEventListener("error", () => show("connecting again", "bad"));
    source.addEventListener("progress", (event) => {
      show("connected", "good");
      const progress = JSON.parse(event.data);
      if (isNew(progress)) return pass(progress);
      clearTimeout(timer);
      timer = setTimeout(() => pass(progress), Math.max(0, due - Date.now()));
    });
  };
  const close = () => {
    source?.close();
    source = null;
  };
  const turn = () => (document.hidden ? close() : open());
  document.addEventListener("visibilitychange", turn);
  open();
  return () => {
    document.removeEventListener("visibilitychange", turn);
    clearTimeout(timer);
    close();
  };
}
