// The last prompts, one row each: where their tokens came from, and the edit that broke the prefix.

import { ServerError, explained, sendForJson } from "./api.js";
import { byId, count, element, filled, percent, plural, setError, timeOfDay } from "./dom.js";
import { KINDS, kindOf } from "./kinds.js";

const MOST = 12; // rows
const SHOWN = 60; // characters of one side of an edit
const SHARED = 32; // characters before it

/** Returns what refreshes the rows. */
export function startRequests() {
  const known = new Map(); // explanations by the id of the answer
  let seq = null;
  let isBusy = false;
  byId("requests-refresh").addEventListener("click", refresh);
  byId("requests-legend").append(
    ...KINDS.map(({ name, label }) =>
      element("span", {}, element("span", { class: `swatch fill ${name}` }), label),
    ),
  );
  return { refresh, take, clear };

  /** The live view has news: asks if there are new answers among them. */
  function take(live) {
    if (live.seq !== seq) refresh();
    seq = live.seq;
  }

  /** Another key sees other answers. */
  function clear() {
    known.clear();
    draw([]);
  }

  async function refresh() {
    if (isBusy) return;
    isBusy = true;
    try {
      const { data } = await sendForJson("kvboost/explain");
      const last = data.slice(-MOST);
      for (const { id } of last) if (!known.has(id)) await load(id);
      for (const id of known.keys()) if (!last.some((one) => one.id === id)) known.delete(id);
      draw(last.filter(({ id }) => known.has(id)));
      setError("requests-error", "");
    } catch (error) {
      setError("requests-error", explained(error));
    } finally {
      isBusy = false;
    }
  }

  async function load(id) {
    try {
      const { explanations } = await sendForJson(`kvboost/explain/${encodeURIComponent(id)}`);
      known.set(id, explanations[0]);
    } catch (error) {
      if (!(error instanceof ServerError && error.status === 404)) throw error; // gone meanwhile
    }
  }

  function draw(answers) {
    const place = byId("requests-list");
    const open = new Set([...place.querySelectorAll("details[open]")].map((one) => one.dataset.id));
    const longest = Math.max(1, ...answers.map(({ id }) => known.get(id).prompt_tokens));
    const rows = answers.map((answer) =>
      row(answer, known.get(answer.id), longest, open.has(answer.id)),
    );
    const nothing = element("li", { class: "meta" }, "Nothing has been asked yet.");
    place.replaceChildren(...(rows.length ? rows : [nothing]));
  }
}

function row({ id, created }, explanation, longest, isOpen) {
  const { prompt_tokens: all, computed_tokens: computed, divergence, parts } = explanation;
  const bar = element("span", { class: "bar map", "aria-hidden": "true" });
  bar.append(...parts.map((part) => segment(part, all)));
  const map = element("span", { class: "map-place" }, bar);
  map.style.width = `${(100 * all) / longest}%`;
  if (divergence) {
    const mark = element("span", { class: "edit-mark", "aria-hidden": "true" }, "▼");
    mark.style.left = `${(100 * divergence.row) / all}%`;
    map.append(mark);
  }
  const title = element(
    "span",
    { class: "request-title" },
    element("span", {}, `${timeOfDay(created)} · ${plural(all, "token")}`),
    element("b", {}, `${percent(all - computed, all)} reused`),
  );
  const summary = element("summary", {}, title, map, edit(explanation));
  return element(
    "li",
    {},
    element("details", { "data-id": id, open: isOpen }, summary, details(explanation)),
  );
}

function segment(part, all) {
  const node = filled(part.kind, (part.end - part.start) / all);
  node.title = `${kindOf(part.kind).label}: ${part.detail}`;
  if (part.recomputed) {
    node.append(filled("recomputed", part.recomputed / (part.end - part.start)));
  }
  return node;
}

/** What made the prompt leave the cached text, in a line. */
function edit({ divergence, parts }) {
  const line = element("span", { class: "edit" });
  if (!divergence) {
    const isKnown = parts[0]?.kind !== "compute";
    line.append(isKnown ? "Goes on where known text ends." : "No known text begins like this.");
    return line;
  }
  const { before, cached, prompt } = divergence;
  const [old, now, after] = apart(cached ?? "", prompt);
  line.append(
    element("b", {}, `▼ line ${count(divergence.line)} `),
    before.length > SHARED ? `…${before.slice(-SHARED)}` : before,
  );
  if (cached === null) line.append(element("ins", {}, short(prompt)));
  else line.append(element("del", {}, short(old)), " ", element("ins", {}, short(now)), after);
  return line;
}

/** Two sides of an edit without the end that they share, and that end. */
function apart(old, now) {
  let same = 0;
  const most = Math.min(old.length, now.length);
  while (same < most && old.at(-1 - same) === now.at(-1 - same)) same += 1;
  const end = now.length - same;
  return [old.slice(0, old.length - same), now.slice(0, end), now.slice(end)];
}

function short(text) {
  const shown = text.replaceAll("\n", "⏎");
  return shown.length > SHOWN ? `${shown.slice(0, SHOWN)}…` : shown;
}

function details({ divergence, parts, notes }) {
  const shown = element("div", { class: "request-parts" });
  if (divergence && divergence.cached !== null) {
    const { before, cached, prompt } = divergence;
    const [old, now, after] = apart(cached, prompt);
    shown.append(
      side("cached", before, element("del", {}, old), after),
      side("prompt", before, element("ins", {}, now), after),
    );
  }
  shown.append(
    element(
      "ul",
      {},
      ...parts.map((part) =>
        element(
          "li",
          {},
          element("span", { class: `swatch fill ${part.kind}`, "aria-hidden": "true" }),
          element("b", {}, plural(part.end - part.start, "token")),
          element("span", {}, `${part.detail}${part.document ? ` (${part.document})` : ""}`),
          element("q", {}, part.text.trim()),
        ),
      ),
    ),
    ...notes.map((note) => element("p", { class: "meta" }, note)),
  );
  return shown;
}

function side(label, ...line) {
  return element("p", { class: "side" }, element("b", {}, label), element("code", {}, ...line));
}
