// The page: what its controls do.

import { Answer, question } from "./chat.js";
import { element, find } from "./dom.js";
import { Service } from "./service.js";
import { showSteps } from "./steps.js";
import { atStep, draw, ranksOf, stepsOf, sums } from "./timeline.js";

const LOOK_EVERY_MS = 500;
const TRACED = { steps: 6, timeout: 5 };

const service = new Service(() => find("key").value.trim());
let model = null;
let messages = [];
let running = null;
let trace = null;
let ranks = [];

async function askModel() {
  const list = await service.json("v1/models");
  model = list.data[0].id;
  find("model").textContent = model;
}

async function begin() {
  try {
    await askModel();
    await look();
  } catch (error) {
    find("model").textContent = error.message;
  }
}

/** The figures of the last steps, again and again until an answer has ended. */
async function watch(controller) {
  while (running === controller) {
    await look();
    await new Promise((go) => setTimeout(go, LOOK_EVERY_MS));
  }
  await look();
}

async function look() {
  try {
    showSteps(await service.json("v1/steps"), find("figures"), find("steps").tBodies[0]);
    find("engine-note").textContent = "Figures of the last steps, of all requests together.";
  } catch (error) {
    find("engine-note").textContent = error.message;
  }
}

function number(id, name) {
  const field = find(id);
  if (!field.checkValidity()) throw new Error(`${name}: ${field.validationMessage}`);
  return field.value === "" ? undefined : field.valueAsNumber;
}

function functions() {
  const text = find("tools").value.trim();
  try {
    return text ? JSON.parse(text) : undefined;
  } catch (error) {
    throw new Error(`Functions: ${error.message}`);
  }
}

/** The body of the next request. Throws an Error for what is wrong with a setting. */
function request(words) {
  const system = find("system").value.trim();
  const stop = find("stop").value.split("\n").filter(Boolean);
  return {
    model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages, { role: "user", content: words }],
    stream: true,
    stream_options: { include_usage: true },
    return_token_origins: true,
    temperature: number("temperature", "Temperature"),
    max_tokens: number("max-tokens", "Max tokens"),
    stop: stop.length ? stop : undefined,
    tools: functions(),
  };
}

async function send() {
  const words = find("message").value.trim();
  if (!words || running) return;
  const mine = new AbortController();
  let answer = null;
  start(mine);
  try {
    if (model === null) await askModel();
    const body = request(words);
    if (find("trace-answers").checked) makeTrace();
    find("message").value = "";
    answer = new Answer();
    find("log").append(question(words), answer.node);
    for await (const event of service.events("v1/chat/completions", body, mine.signal)) {
      if (mine.signal.aborted) break;
      answer.add(event);
      find("log").scrollTop = find("log").scrollHeight;
    }
  } catch (error) {
    if (!mine.signal.aborted) fail(error, words, answer);
  }
  if (running !== mine) return; // a new chat has begun
  if (mine.signal.aborted) answer?.end("stopped");
  if (answer?.content) messages.push({ role: "user", content: words }, { role: "assistant", content: answer.content });
  finish();
}

function start(controller) {
  running = controller;
  find("error").hidden = true;
  find("send").disabled = true;
  find("cancel").disabled = false;
  find("log").setAttribute("aria-busy", "true");
  watch(controller);
}

function finish() {
  running = null;
  find("send").disabled = false;
  find("cancel").disabled = true;
  find("log").removeAttribute("aria-busy");
  find("message").focus();
}

function fail(error, words, answer) {
  find("error").textContent = error.message;
  find("error").hidden = false;
  if (answer?.tokens) return answer.end("broken off");
  find("message").value ||= words;
  answer?.node.previousSibling.remove();
  answer?.node.remove();
}

function newChat() {
  if (running) {
    running.abort();
    finish();
  }
  messages = [];
  find("log").replaceChildren();
  find("error").hidden = true;
  find("message").focus();
}

async function makeTrace() {
  if (find("trace").disabled) return; // one is being made
  find("trace").disabled = true;
  find("timeline-note").textContent = `Waiting for ${TRACED.steps} steps…`;
  try {
    showTrace(await service.json("v1/steps/trace", TRACED));
  } catch (error) {
    find("timeline-note").textContent = error.message;
  }
  find("trace").disabled = false;
}

function showTrace(made) {
  const traced = ranksOf(made);
  if (!traced.length) {
    find("timeline-note").textContent = "No step has run meanwhile: ask for something.";
    return;
  }
  [trace, ranks] = [made, traced];
  const steps = stepsOf(ranks);
  const options = steps.map((step) => element("option", { value: step }, `step ${step}`));
  find("shown").replaceChildren(element("option", { value: "" }, "all steps"), ...options);
  find("timeline-note").textContent = `Steps ${steps[0]} to ${steps.at(-1)}, on one clock.`;
  find("save").disabled = false;
  showTimeline();
}

function showTimeline() {
  if (!ranks.length) return;
  const step = find("shown").value;
  const shown = step === "" ? ranks : atStep(ranks, Number(step));
  draw(shown, find("drawing"));
  find("sums").hidden = false;
  find("sums").tBodies[0].replaceChildren(...sums(shown));
}

function saveTrace() {
  const address = URL.createObjectURL(new Blob([JSON.stringify(trace)], { type: "application/json" }));
  element("a", { href: address, download: "trace.json" }).click();
  URL.revokeObjectURL(address);
}

async function loadTrace() {
  const [file] = find("load").files;
  if (!file) return;
  try {
    showTrace(JSON.parse(await file.text()));
  } catch (error) {
    find("timeline-note").textContent = `${file.name}: ${error.message}`;
  }
  find("load").value = ""; // so that the same file can be opened again
}

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
find("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
find("cancel").addEventListener("click", () => running?.abort());
find("new").addEventListener("click", newChat);
find("key").addEventListener("change", begin);
find("colours").addEventListener("change", () => find("log").classList.toggle("colours", find("colours").checked));
find("trace").addEventListener("click", makeTrace);
find("shown").addEventListener("change", showTimeline);
find("save").addEventListener("click", saveTrace);
find("load").addEventListener("change", loadTrace);
window.addEventListener("resize", showTimeline);

find("log").classList.add("colours");
await begin();
