// What the engines say of their last steps.

import { element, row } from "./dom.js";

const SHOWN_STEPS = 10;

/** The figures of a StepList's steps, all engines together: names and texts. */
export function figuresOf(list) {
  const steps = list.data.flatMap((replica) => replica.steps);
  const sum = (value) => total(steps, value);
  const speeds = list.data.map(({ steps }) => total(steps, tokens) / (total(steps, whole) || 1));
  const exposed = sum((step) => step.verify_exposed_seconds + step.draft_exposed_seconds);
  return {
    Acceptance: share(sum((step) => step.accepted), sum((step) => step.drafted)),
    "Tokens/s at work": speeds.reduce((all, speed) => all + speed, 0).toFixed(1),
    "Tokens a row": ratio(sum(tokens), sum((step) => step.decode_tokens - step.drafted)),
    "Steps in two halves": share(steps.filter((step) => step.halves === 2).length, steps.length),
    "Exposed communication": share(exposed, sum(whole)),
    "Waiting for plans": share(sum((step) => step.wait_seconds), sum(whole)),
  };
}

/** Puts a StepList's figures and latest steps into the page. */
export function showSteps(list, figures, body) {
  figures.replaceChildren(
    ...Object.entries(figuresOf(list)).map(([name, value]) =>
      element("div", {}, element("dt", {}, name), element("dd", {}, value)),
    ),
  );
  const several = list.data.length > 1;
  const rows = list.data.flatMap(({ replica, steps }) =>
    steps.slice(-SHOWN_STEPS).reverse().map((step) => stepRow(step, several ? `${replica} ` : "")),
  );
  body.replaceChildren(...rows);
}

function stepRow(step, replica) {
  return row(
    replica + step.number,
    step.rows,
    step.prefill_tokens + step.decode_tokens,
    step.drafted ? `${step.accepted} of ${step.drafted}` : "–",
    `${step.halves} (${step.reason})`,
    milliseconds(step.verify_seconds + step.draft_seconds),
    step.predicted_seconds === null ? "–" : milliseconds(step.predicted_seconds),
    milliseconds(step.verify_exposed_seconds + step.draft_exposed_seconds),
  );
}

const total = (steps, value) => steps.reduce((all, step) => all + value(step), 0);
/** What decode rows bring: their accepted drafts, and a token each. */
const tokens = (step) => step.decode_tokens - step.drafted + step.accepted;
const whole = (step) => step.wait_seconds + step.verify_seconds + step.draft_seconds;
const milliseconds = (seconds) => (seconds * 1000).toFixed(1);
const share = (part, all) => (all ? `${((100 * part) / all).toFixed(1)}%` : "–");
const ratio = (part, all) => (all ? (part / all).toFixed(2) : "–");
