// Requests to the server: the key, errors in OpenAI's format, server-sent events.
// Addresses are relative, so that the page also works if a proxy serves it under another path.

const KEY = "kvboost-key";
const BROKEN = "The connection ended before the answer did.";

/** Dispatches an event "key" when the server needs a key, with its message and status. */
export const watch = new EventTarget();

export class ServerError extends Error {
  /** ``param`` is the field of the request that is wrong, if it is one. */
  constructor(status, message, { retryAfter = null, param = null } = {}) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
    this.param = param;
  }
}

/** There was no response, or it stopped before its end. */
export class ConnectionError extends Error {}

let given = ""; // the key, where a browser blocks its storage

export function key() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return given;
  }
}

/** The key is kept in this tab only; "" removes it. */
export function setKey(value) {
  given = value;
  try {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  } catch {
    // It lasts until the page is left.
  }
}

/** A successful response. Raises ServerError for an error response, ConnectionError if there is
 * none, and the reason of ``signal`` if it aborts. */
export async function send(path, { body, signal, requestId } = {}) {
  const headers = {};
  if (requestId) headers["x-request-id"] = requestId;
  if (key()) headers.authorization = `Bearer ${key()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const response = await connected("The server cannot be reached.", () =>
    fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
    }),
  );
  if (response.ok) return response;
  const { message, param } = await errorOf(response);
  if (response.status === 401 || response.status === 403)
    needKey(message, response.status);
  const retryAfter = response.headers.get("retry-after");
  throw new ServerError(response.status, message, { retryAfter, param });
}

export function needKey(message = "", status = null) {
  watch.dispatchEvent(new CustomEvent("key", { detail: { message, status } }));
}

/** A name that nobody else has. */
export function randomName(prefix) {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return `${prefix}-${[...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

export async function sendForJson(path, options) {
  return (await send(path, options)).json();
}

/** fetch reports a broken connection as a TypeError. */
async function connected(message, work) {
  try {
    return await work();
  } catch (error) {
    throw error instanceof TypeError ? new ConnectionError(message) : error;
  }
}

async function errorOf(response) {
  const text = await response.text();
  try {
    const { error, detail } = JSON.parse(text);
    const message = error?.message ?? detail;
    if (typeof message === "string") return { message, param: error?.param ?? null };
  } catch {
    // Not JSON: the response is from a proxy.
  }
  return { message: text.slice(0, 300) || `the server answered ${response.status}`, param: null };
}

/** The objects of a stream of server-sent events, until [DONE]; ConnectionError without one. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { value, done } = await connected(BROKEN, () => reader.read());
      if (done) throw new ConnectionError(BROKEN);
      // A "\r" at the end may be half of a line end: keep it for the next piece.
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue; // a comment, or the empty line between events
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

let served = null;

/** The name of the model this server serves. */
export async function modelName() {
  served ??= (await sendForJson("v1/models")).data[0].id;
  return served;
}

/** Sets the name when the live view has it already. */
export function setModel(name) {
  served = name;
}

/** A message for the user about an error of ``send`` or ``events``. */
export function explained(error) {
  if (error instanceof ServerError) {
    const wait = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
    return `${sentence(error.message)}${wait}`;
  }
  if (error.name === "TimeoutError") return "The server did not answer in time.";
  if (!(error instanceof ConnectionError)) console.error(error); // ours
  return error.message;
}

/** Servers' messages begin in lower case and have no full stop. */
function sentence(message) {
  const ended = /[.!?]$/.test(message) ? message : `${message}.`;
  return ended[0].toUpperCase() + ended.slice(1);
}
