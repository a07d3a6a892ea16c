// Draws a trace in Chrome's format: a lane a thread, ranks below each other.

import { row, shape } from "./dom.js";

const LABELS = 100;
const LANE = 18;
const TITLE = 22;
const NARROWEST = 0.4; // pixels; what is narrower is drawn only where nothing else is

/** Ranks, each {name, spans}; times in milliseconds. Throws an Error for what is no trace. */
export function ranksOf(trace) {
  if (!Array.isArray(trace?.traceEvents)) throw new Error("this is not a trace in Chrome's format");
  const ranks = new Map();
  const lanes = new Map();
  const rank = (id) => ranks.get(id) ?? ranks.set(id, { name: `rank ${id}`, spans: [] }).get(id);
  for (const event of trace.traceEvents) {
    if (event.name === "process_name") rank(event.pid).name = String(event.args.name);
    if (event.name === "thread_name") lanes.set(`${event.pid} ${event.tid}`, String(event.args.name));
    if (event.ph !== "X") continue;
    rank(event.pid).spans.push({
      name: String(event.name),
      kind: String(event.cat),
      thread: Number(event.tid),
      start: event.ts / 1000,
      end: (event.ts + event.dur) / 1000,
      step: event.args.step,
      layer: event.args.layer,
    });
  }
  for (const [id, { spans }] of ranks) {
    for (const span of spans) span.lane = lanes.get(`${id} ${span.thread}`) ?? `thread ${span.thread}`;
    spans.sort((a, b) => a.start - b.start || b.end - a.end);
  }
  return [...ranks.values()].filter(({ spans }) => spans.length);
}

/** The steps that were traced, by number. */
export function stepsOf(ranks) {
  const steps = new Set(ranks.flatMap(({ spans }) => spans.map(({ step }) => step)));
  return [...steps].sort((a, b) => a - b);
}

/** The ranks with the spans of one step only. */
export function atStep(ranks, step) {
  return ranks.map(({ name, spans }) => ({ name, spans: spans.filter((span) => span.step === step) }));
}

/** Draws ranks into an element, over all of its width. */
export function draw(ranks, into) {
  const spans = ranks.flatMap((rank) => rank.spans);
  const from = spans.reduce((least, { start }) => Math.min(least, start), Infinity);
  const to = spans.reduce((most, { end }) => Math.max(most, end), -Infinity);
  const width = Math.max(into.clientWidth, 480);
  const x = (time) => LABELS + ((time - from) / Math.max(to - from, 1e-6)) * (width - LABELS - 8);
  const drawing = shape("svg", { role: "img", "aria-label": `${ranks.length} ranks, ${(to - from).toFixed(2)} ms` });
  let y = TITLE;
  drawing.append(...ticks(from, to, x));
  for (const rank of ranks) {
    drawing.append(shape("text", { class: "rank", x: 0, y: y + 15 }, rank.name));
    y += TITLE;
    for (const lane of lanesOf(rank)) {
      drawing.append(drawLane(lane, rank.spans, x, y));
      y += LANE;
    }
  }
  drawing.setAttribute("width", width);
  drawing.setAttribute("height", y + 4);
  into.replaceChildren(drawing);
}

/** Rows of a table that says what the drawing shows. */
export function sums(ranks) {
  return ranks.map(({ name, spans }) => {
    const of = (kind, ...lanes) =>
      spans.filter((span) => span.kind === kind && span.name !== "wait for plan" && (!lanes.length || lanes.includes(span.lane)));
    const computes = (lane) => covered([...of("work", lane), ...of("wait", lane)]) - covered(of("wait", lane));
    const [transfers, waits] = [of("transfer"), of("wait")];
    const hidden = covered([...transfers, ...waits]) - covered(waits);
    const values = [computes("half 0"), computes("half 1"), covered(transfers), hidden, covered(waits)];
    return row(name, ...values.map((value) => value.toFixed(2)));
  });
}

function lanesOf({ spans }) {
  const threads = new Map(spans.map(({ thread, lane }) => [thread, lane]));
  return [...threads].sort(([a], [b]) => a - b).map(([, lane]) => lane);
}

function drawLane(lane, spans, x, y) {
  const group = shape("g", { "data-lane": lane }, shape("text", { x: 0, y: y + 13 }, lane));
  let last = -Infinity;
  for (const span of spans) {
    if (span.lane !== lane) continue;
    const [left, right] = [x(span.start), x(span.end)];
    if (right - left < NARROWEST && right - last < NARROWEST) continue;
    last = right;
    const layer = span.layer === undefined ? "" : `, layer ${span.layer}`;
    const title = `${span.name}${layer}, step ${span.step}: ${(span.end - span.start).toFixed(3)} ms`;
    const lower = span.kind === "wait" ? (LANE - 3) / 2 : 0; // told apart without colours too
    const place = { x: left, y: y + lower, width: Math.max(right - left, NARROWEST), height: LANE - 3 - lower };
    group.append(shape("rect", { ...place, "data-kind": span.kind }, shape("title", {}, title)));
  }
  return group;
}

function ticks(from, to, x) {
  const wanted = (to - from) / 8;
  const power = 10 ** Math.floor(Math.log10(Math.max(wanted, 1e-6)));
  const every = [1, 2, 5, 10].map((times) => times * power).find((size) => size >= wanted) ?? power;
  const drawn = [];
  for (let time = 0; time <= to - from; time += every) {
    const place = x(from + time);
    drawn.push(shape("line", { x1: place, x2: place, y1: 14, y2: "100%" }));
    drawn.push(shape("text", { class: "tick", x: place + 2, y: 12 }, `${Number(time.toPrecision(6))} ms`));
  }
  return drawn;
}

/** How long at least one of the spans lasts. */
function covered(spans) {
  let [length, end] = [0, -Infinity];
  for (const span of [...spans].sort((a, b) => a.start - b.start)) {
    length += Math.max(0, span.end - Math.max(span.start, end));
    end = Math.max(end, span.end);
  }
  return length;
}
