// What can happen to a trained token (docs/journal.md), in words.

const WORDS = {
  kept: ["kept", "kept"], clipped_low: ["clipped low", "clipped, S too low"], clipped_high: ["clipped high", "clipped, S too high"], capped: ["capped", "capped by the ratio cap"],
  masked: ["masked", "masked by the correction"], vetoed: ["vetoed", "vetoed with its sequence"], dropped: ["dropped", "dropped by a technique"], skipped: ["skipped", "skipped: no gradient"],
};

export const OUTCOMES = Object.keys(WORDS);
export const outcomeWord = (name) => WORDS[name]?.[0] ?? name;
export const outcomeText = (name) => WORDS[name]?.[1] ?? name;
