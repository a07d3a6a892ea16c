// The conversation: what was said, and each answer as it comes, token by token.

import { element } from "./dom.js";

const ORIGINS = ["accepted", "recovered", "bonus", "plain"];

/** Shows one answer while it is streamed. */
export class Answer {
  constructor() {
    this.content = "";
    this.counts = Object.fromEntries(ORIGINS.map((origin) => [origin, 0]));
    this.began = performance.now();
    this.usage = null;
    this.ending = "";
    this.origin = "plain";
    this.texts = {};
    this.figures = element("p", { class: "figures" });
    this.parts = element("div");
    this.node = said("assistant", "Model", this.parts, this.figures);
  }

  /** Takes an event of the stream. */
  add(event) {
    if (event.usage) this.usage = event.usage;
    for (const choice of event.choices) {
      this.#count(choice.token_origins ?? []);
      const { content, reasoning_content: reasoning, tool_calls: calls = [] } = choice.delta;
      if (reasoning) this.#show("reasoning", reasoning);
      if (content) {
        this.content += content;
        this.#show("content", content);
      }
      for (const call of calls) {
        const name = call.function.name ? `${call.function.name} ` : "";
        this.#show(`call ${call.index}`, name + call.function.arguments);
      }
      if (choice.finish_reason === "length") this.ending = "ended at the limit of tokens";
    }
    this.#tell();
  }

  /** Says why it is not whole. */
  end(why) {
    this.ending = why;
    this.#tell();
  }

  get tokens() {
    return ORIGINS.reduce((sum, origin) => sum + this.counts[origin], 0);
  }

  #count(origins) {
    if (!origins.length) return;
    this.latest = performance.now();
    for (const origin of origins) this.counts[origin] += 1;
    this.origin = origins.at(-1);
    if (this.first === undefined) [this.first, this.atFirst] = [this.latest, this.tokens];
  }

  /** Text goes behind what is there of its kind, in the colour of the last token. */
  #show(kind, text) {
    this.texts[kind] ??= this.#begin(kind);
    this.texts[kind].append(element("span", { class: "token", "data-origin": this.origin }, text));
  }

  #begin(kind) {
    const text = element("p", { class: kind.startsWith("call") ? "text call" : `text ${kind}` });
    if (kind === "content") {
      this.parts.append(text);
    } else {
      const title = kind === "reasoning" ? "Reasoning" : `Function call ${Number(kind.slice(5)) + 1}`;
      this.parts.append(element("details", { open: "" }, element("summary", {}, title), text));
    }
    return text;
  }

  #tell() {
    const figures = [];
    if (this.first !== undefined) {
      const origins = ORIGINS.filter((origin) => this.counts[origin]);
      figures.push(`${this.tokens} tokens: ${origins.map((each) => `${this.counts[each]} ${each}`).join(", ")}`);
      const seconds = (this.latest - this.first) / 1000;
      if (seconds > 0) figures.push(`${((this.tokens - this.atFirst) / seconds).toFixed(1)} tokens/s`);
      figures.push(`first after ${((this.first - this.began) / 1000).toFixed(2)} s`);
    }
    if (this.usage) figures.push(acceptance(this.usage.completion_tokens_details));
    if (this.ending) figures.push(this.ending);
    this.figures.replaceChildren(figures.filter(Boolean).join(" · "));
    Object.assign(this.node.dataset, this.counts);
  }
}

/** The article of the user's words. */
export function question(text) {
  return said("user", "You", element("p", { class: "text" }, text));
}

function said(role, name, ...parts) {
  return element("article", { "data-role": role }, element("h3", {}, name), ...parts);
}

function acceptance({ accepted_prediction_tokens: accepted, rejected_prediction_tokens: rejected }) {
  const drafted = accepted + rejected;
  return drafted ? `${((100 * accepted) / drafted).toFixed(1)}% of ${drafted} drafts accepted` : "";
}
