// Asks the service that the page came from.

/** What went wrong, in words for the reader. */
export class ServiceError extends Error {}

/** The service under the page's own address. */
export class Service {
  /** `key` gives the API key, or an empty text. */
  constructor(key) {
    this.key = key;
  }

  /** The answer to a GET, or to a POST of `body`. */
  async json(path, body) {
    const response = await this.#fetch(path, body);
    return await response.json();
  }

  /** The objects of a stream of events, up to its end. */
  async *events(path, body, signal) {
    const response = await this.#fetch(path, body, signal);
    let held = "";
    for await (const text of pieces(response.body)) {
      const blocks = (held + text).split("\n\n");
      held = blocks.pop();
      for (const block of blocks) {
        const data = block.replace(/^data: /, "");
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ServiceError(event.error.message);
        yield event;
      }
    }
    throw new ServiceError("The connection ended before the answer was complete.");
  }

  async #fetch(path, body, signal) {
    const headers = {};
    if (this.key()) headers.Authorization = `Bearer ${this.key()}`;
    if (body) headers["Content-Type"] = "application/json";
    const options = body ? { method: "POST", body: JSON.stringify(body) } : {};
    let response;
    try {
      response = await fetch(new URL(path, document.baseURI), { ...options, headers, signal });
    } catch (error) {
      throw worded(error);
    }
    if (!response.ok) throw await refusal(response);
    return response;
  }
}

async function* pieces(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } catch (error) {
    throw worded(error);
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Browsers say "TypeError" when a connection fails. */
function worded(error) {
  return error instanceof TypeError ? new ServiceError("The service cannot be reached. Is it running?") : error;
}

async function refusal(response) {
  const body = await response.json().catch(() => null);
  const words = [body?.error?.message ?? `The service answered ${response.status} ${response.statusText}`];
  if (response.status === 401) words.push("The field for the key is under Settings");
  const seconds = response.headers.get("Retry-After");
  if (seconds) words.push(`Try again in ${seconds} s`);
  return new ServiceError(`${words.join(". ")}.`);
}
