// Reads conversations that a browser has kept. Anything may be stored there: another version of the
// page, another page at this address, or a user may have written it. Every value is checked and
// copied by name; a conversation with a wrong one is left out.

import { KINDS } from "./kinds.js";
import { OPENAI_FIELDS } from "./snippets.js";

const MOST_TURNS = 500;
const MOST_SPANS = 10_000;
const REQUEST_FIELDS = new Set([...OPENAI_FIELDS, "cache_salt", "kvboost"]);

class WrongError extends Error {}

/** The first ``most`` conversations of ``value`` that are whole. */
export function storedConversations(value, most) {
  const found = [];
  for (const one of Array.isArray(value) ? value.slice(0, most) : []) {
    try {
      found.push(conversation(one));
    } catch (error) {
      if (!(error instanceof WrongError)) throw error;
    }
  }
  return found;
}

function wrong() {
  throw new WrongError("not what this page writes");
}

const text = (value) => (typeof value === "string" ? value : wrong());
const number = (value) => (Number.isFinite(value) ? value : wrong());
const optional = (read) => (value) => value === null || value === undefined ? null : read(value);
const oneOf = (values) => (value) => values.includes(value) ? value : wrong();

function list(read, most) {
  return (value) => (Array.isArray(value) && value.length <= most ? value.map(read) : wrong());
}

export function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** ``fields``: what reads the value of each name. Other names are left out. */
function record(fields) {
  const entries = Object.entries(fields);
  return (value) => {
    if (!isObject(value)) wrong();
    const own = (name) => (Object.hasOwn(value, name) ? value[name] : undefined);
    return Object.fromEntries(entries.map(([name, read]) => [name, read(own(name))]));
  };
}

/** A request is copied into commands as it is, so it has to be one that this page sends. */
function request(value) {
  if (!isObject(value)) wrong();
  return Object.keys(value).every((name) => REQUEST_FIELDS.has(name)) ? value : wrong();
}

const userMessage = record({ role: oneOf(["user"]), content: text });
const toolMessage = record({ role: oneOf(["tool"]), tool_call_id: text, content: text });
const message = (value) => (value?.role === "tool" ? toolMessage : userMessage)(value);

const report = record({
  mode: text,
  exact_tokens: number,
  approximate_tokens: number,
  moved_tokens: number,
  recomputed_tokens: number,
  computed_tokens: number,
  ttft_ms: number,
  queue_ms: number,
  total_ms: number,
  estimated_ms_without_reuse: optional(number),
  notes: list(text, MOST_SPANS),
  spans: list(
    record({
      kind: oneOf(KINDS.map((kind) => kind.name)),
      start: number,
      end: number,
      tokens: number,
      recomputed: number,
      donor: optional(text),
      tier: optional(text),
      resemblance: number,
      text: optional(text),
    }),
    MOST_SPANS,
  ),
});

const answer = record({
  content: text,
  reasoning: text,
  calls: list(record({ id: text, name: text, arguments: text }), MOST_TURNS),
  finish: optional(text),
  usage: optional(record({ completion_tokens: number })),
  report: optional(report),
  ttft: optional(number),
  seen: optional(number),
  requestId: optional(text),
});

const healing = record({
  request_id: text,
  approximate_tokens: number,
  healed_tokens: number,
  status: text,
  audit: optional(
    record({ compared_tokens: number, agreement: number, mean_kl: optional(number) }),
  ),
});

const plainTurn = {
  added: (value) => (value?.length ? list(message, MOST_TURNS)(value) : wrong()),
  request: optional(request),
  kind: oneOf(["plain"]),
  texts: (value) => (value?.length === 2 ? list(text, 2)(value) : wrong()),
  answer,
  other: () => null,
  healing: optional(healing),
};
const readPlain = record(plainTurn);
const readPair = record({ ...plainTurn, kind: oneOf(["compared", "shuffled"]), other: answer });
const turn = (value) => (value?.kind === "plain" ? readPlain : readPair)(value);

const conversation = record({
  at: number,
  system: text,
  documents: text,
  salt: text,
  turns: (value) => (value?.length ? list(turn, MOST_TURNS)(value) : wrong()),
});
