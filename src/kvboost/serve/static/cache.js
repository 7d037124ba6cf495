// The chunks in the cache, the most valuable first, and the form to forget a text.

import { explained, sendForJson } from "./api.js";
import { byId, bytes, count, element, percent, plural, setError } from "./dom.js";

/** Returns a function that loads the list again. */
export function startCache() {
  byId("cache-refresh").addEventListener("click", refresh);
  byId("forget-form").addEventListener("submit", (event) => {
    event.preventDefault();
    confirm();
  });
  byId("forget-dialog").addEventListener("close", () => {
    if (byId("forget-dialog").returnValue === "forget") forget();
  });
  return refresh;
}

async function refresh() {
  try {
    draw(await sendForJson("kvboost/cache?limit=20"));
    setError("cache-error", "");
  } catch (error) {
    setError("cache-error", explained(error));
  }
}

function draw({ stats, chunks }) {
  byId("cache-meta").textContent = [
    chunks.length < stats.chunks
      ? `${count(chunks.length)} of ${plural(stats.chunks, "chunk")}`
      : plural(stats.chunks, "chunk"),
    `${percent(stats.token_reuse_rate, 1)} of all prompt tokens reused`,
    `${plural(stats.requests, "request")}`,
    stats.evicted && `${count(stats.evicted)} evicted`,
    stats.failed && `${plural(stats.failed, "fault")}`,
  ]
    .filter(Boolean)
    .join(" · ");
  const rows = chunks.map((chunk) =>
    element(
      "tr",
      { role: "row" },
      cell("text", "", element("span", {}, chunk.text)),
      cell("number", chunk.tokens === 1 ? "token" : "tokens", count(chunk.tokens)),
      cell("number", "", bytes(chunk.bytes)),
      cell("", "", chunk.tier ?? ""),
      cell("", "", chunk.lineage),
      cell("number", chunk.uses === 1 ? "use" : "uses", count(chunk.uses)),
    ),
  );
  const nothing = element(
    "tr",
    { role: "row" },
    element("td", { role: "cell", colspan: "6", class: "none" }, "Nothing has been read yet."),
  );
  byId("chunks").replaceChildren(...(rows.length ? rows : [nothing]));
}

/** ``unit`` follows the value where the column's title is hidden: on a phone. */
function cell(kind, unit, value) {
  return element("td", { role: "cell", class: kind, "data-unit": unit }, value);
}

function confirm() {
  const text = byId("forget-text").value;
  byId("forget-status").textContent = "";
  byId("forget-preview").textContent = text.length > 400 ? `${text.slice(0, 400)} …` : text;
  byId("forget-dialog").returnValue = "";
  byId("forget-dialog").showModal();
}

async function forget() {
  const status = byId("forget-status");
  try {
    const { forgotten } = await sendForJson("kvboost/forget", {
      body: { text: byId("forget-text").value },
    });
    status.textContent = forgotten
      ? `${plural(forgotten, "chunk")} forgotten.`
      : "No chunk contains this text.";
    if (forgotten) byId("forget-text").value = "";
    await refresh();
  } catch (error) {
    status.textContent = explained(error);
  }
}
