// Conversations, kept in this browser for this address: what was asked, answered and reported.

import { key } from "./api.js";
import { asMessage } from "./stream.js";

const NAME = `kvboost-conversations:${location.pathname}`;
const MOST = 20;
const MOST_CHARACTERS = 2_000_000; // browsers allow about five million
const TITLE = 48;

/** A conversation: the texts before its first question, and its turns. A turn has the messages it
 * ``added``, the ``request`` that was sent, its ``answer``, the answer without reuse (``off``) if
 * the two were compared, and what has become of approximate rows (``healing``). */
export function newConversation() {
  return { at: Date.now(), system: "", documents: "", turns: [] };
}

/** The messages of the next request. The documents come before the first question, as they are now:
 * changing them changes the beginning of the prompt. */
export function messagesOf({ system, documents, turns }, added) {
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const turn of turns) {
    const said = asMessage(turn.answer);
    if (said) messages.push(...turn.added, said);
  }
  messages.push(...added);
  const first = messages.findIndex((message) => message.role === "user");
  if (documents && first >= 0) {
    const question = messages[first];
    messages[first] = { ...question, content: `${documents}\n\n${question.content}` };
  }
  return messages;
}

export function titleOf({ turns }) {
  const question = turns[0]?.added[0]?.content ?? "";
  const line = question.replace(/\s+/g, " ").trim();
  if (!line) return "New conversation";
  return line.length > TITLE ? `${line.slice(0, TITLE - 1)}…` : line;
}

/** The newest first. */
export function loadConversations() {
  try {
    const found = JSON.parse(storage().getItem(NAME) ?? "[]");
    return Array.isArray(found) ? found.filter((one) => Array.isArray(one?.turns)) : [];
  } catch {
    return []; // another version's, or storage is blocked
  }
}

/** Keeps the newest ones that fit. */
export function saveConversations(conversations) {
  const kept = conversations
    .filter((one) => one.turns.length)
    .slice(0, MOST)
    .map((one) => ({ ...one, turns: one.turns.map((turn) => ({ ...turn })) }));
  let text = JSON.stringify(kept);
  while (kept.length && text.length > MOST_CHARACTERS) {
    drop(kept);
    text = JSON.stringify(kept);
  }
  try {
    storage().setItem(NAME, text);
  } catch {
    // Storage is full or blocked: the page works, and a reload begins anew.
  }
}

/** The oldest conversation, or of the last one the oldest turn's request and report. */
function drop(kept) {
  const bulky = kept.length === 1 && kept[0].turns.find((turn) => turn.request);
  if (!bulky) {
    kept.pop();
    return;
  }
  bulky.request = bulky.off = null;
  bulky.answer = { ...bulky.answer, report: null };
}

export function clearConversations() {
  for (const place of [localStorage, sessionStorage]) place.removeItem(NAME);
}

/** Those that were held with a key. */
export function clearTab() {
  sessionStorage.removeItem(NAME);
}

/** What is said with a key stays in the tab, as the key does. */
function storage() {
  return key() ? sessionStorage : localStorage;
}
