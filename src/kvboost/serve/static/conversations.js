// Conversations, kept in this browser for this address: what was asked, answered and reported.

import { key } from "./api.js";
import { storedConversations } from "./stored.js";
import { asMessage } from "./stream.js";

const NAME = `kvboost-conversations:${location.pathname}`;
const MOST = 20;
const MOST_CHARACTERS = 2_000_000; // browsers allow about five million
const TITLE = 48;

/** A conversation: the texts before its first question, and its turns. A turn has the messages it
 * ``added``, the ``request`` that was sent, its ``answer``, and what has become of approximate rows
 * (``healing``). If its ``kind`` is not "plain", it also has the ``other`` answer that it is
 * compared with, and the order of the ``texts`` in the two requests. ``salt`` keeps the texts of a
 * conversation apart from others in the server's cache. */
export function newConversation() {
  return { at: Date.now(), system: "", documents: "", salt: "", turns: [] };
}

export function newTurn(added, request, kind) {
  return { added, request, kind, texts: ["", ""], answer: null, other: null, healing: null };
}

/** The messages of the next request. The documents come before the first question, as they are now:
 * changing them changes the beginning of the prompt. */
export function messagesOf({ system, documents, turns }, added) {
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const turn of turns) {
    const said = turn.answer && asMessage(turn.answer); // the turn in progress has none yet
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
    const text = storage().getItem(NAME) ?? "[]";
    return text.length <= MOST_CHARACTERS ? storedConversations(JSON.parse(text), MOST) : [];
  } catch {
    return []; // not JSON, or storage is blocked
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
  Object.assign(bulky, { request: null, other: null, kind: "plain" });
  bulky.answer = { ...bulky.answer, report: null };
}

export function clearConversations() {
  remove(() => localStorage);
  clearTab();
}

/** Those that were held with a key. */
export function clearTab() {
  remove(() => sessionStorage);
}

function remove(storageOf) {
  try {
    storageOf().removeItem(NAME);
  } catch {
    // Storage is blocked: nothing was kept.
  }
}

/** What is said with a key stays in the tab, as the key does. */
function storage() {
  return key() ? sessionStorage : localStorage;
}
