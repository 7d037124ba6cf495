// The report about a prompt: the time to the first token, tokens by source, and the prompt itself.

import { gain } from "./comparison.js";
import { count, element, filled, milliseconds, percent, plural, say } from "./dom.js";
import { HEALED, KINDS, kept, reportRows, total } from "./kinds.js";
import { PromptMap, healedRows } from "./map.js";

const HINT = "Point at a word to see what it means.";

/** Draws the report of a turn, and again what healing changes in it. */
export class ReportView {
  constructor(place) {
    this.place = place;
    this.clear();
  }

  showTurn(turn) {
    this.turn = turn;
    this.draw(turn.answer.report, turn);
    this.heal();
  }

  /** A plan: nothing was run, so there is no time. */
  showPlan(report) {
    this.turn = null;
    this.draw(report, null);
  }

  clear() {
    this.turn = this.map = null;
    this.place.classList.add("empty");
    this.place.replaceChildren(
      element("p", {}, "Your prompt will appear here, coloured by what was reused."),
    );
  }

  draw(report, turn) {
    const rows = reportRows(report);
    this.legend = new Legend(rows, total(rows));
    const parts = [firstToken(report, turn), sources(rows, !turn, this.legend)];
    this.map = null;
    if (report.spans?.length) {
      this.map = new PromptMap(report.spans, turn?.healing);
      this.healed = element("span", { class: "note" }, plural(report.spans.length, "part"));
      parts.push(block("The prompt, in order", this.healed, ...this.map.nodes));
    }
    if (report.notes?.length) {
      parts.push(
        element("ul", { class: "notes" }, ...report.notes.map((note) => element("li", {}, note))),
      );
    }
    this.place.classList.remove("empty");
    this.place.replaceChildren(...parts);
  }

  /** Something has become of this turn's approximate tokens. */
  heal() {
    const { map, turn } = this;
    if (!map || !turn?.healing) return;
    map.heal(turn.healing);
    if (turn.healing.healed_tokens) this.legend.heal();
    const all = map.spans.at(-1).end;
    const { from, to } = healedRows(map.spans, turn.healing);
    const done = count(Math.min(to, all) - from);
    const healed = `${done} of ${plural(all - from, "approximate token")} healed`;
    this.healed.textContent = `${plural(map.spans.length, "part")}, ${healed}`;
  }
}

/** Bars of measured times, or of an estimate where nothing was measured. */
function firstToken(report, turn) {
  const times = turn ? measured(turn) : [];
  const estimate = report.estimated_ms_without_reuse;
  if (!turn?.other?.report && estimate) {
    times.push(["without reuse, estimated", "estimated", estimate, 0]);
  }
  const longest = Math.max(...times.map(([, , value]) => value), 1e-9);
  const shown = block(
    "First token",
    "",
    element("div", { class: "lines" }, ...times.map((time) => line(time, longest))),
  );
  // The sentence about two answers is below them.
  if (!turn?.other) {
    shown.firstChild.after(element("p", { class: "headline" }, headline(report, turn)));
  }
  shown.classList.add("first");
  return shown;
}

function headline(report, turn) {
  if (turn) return gain(report);
  const rows = reportRows(report);
  return `${percent(kept(rows), total(rows))} of this prompt is known. Nothing was run.`;
}

function measured({ answer, other, kind }) {
  const bars = (label, { report, seen }) => {
    const found = [[label, "measured", report.ttft_ms, report.queue_ms ?? 0]];
    if (seen !== null) found.push(["seen here", "seen", seen, 0]);
    return found;
  };
  if (!other?.report) return bars("this request", answer);
  if (kind === "compared") return [...bars("with reuse", answer), ...bars("without reuse", other)];
  return [bars("first time", other)[0], bars("again, in another order", answer)[0]];
}

function line([label, kind, value, queue], longest) {
  const queued = Math.min(queue, value);
  const bar = element("span", { class: "bar" });
  if (queued >= 1) bar.append(filled("queued", queued / longest));
  bar.append(filled(kind, (value - queued) / longest));
  const waited = queued >= 1 ? ` (${milliseconds(queued)} queued)` : "";
  return element(
    "div",
    { class: "line" },
    element("span", { class: "of" }, label),
    bar,
    element("span", { class: "value" }, milliseconds(value) + waited),
  );
}

function sources(rows, planned, legend) {
  const all = total(rows);
  const bar = element("div", { class: "bar thick", role: "img", "aria-label": spoken(rows, all) });
  for (const { name } of KINDS) if (rows[name]) bar.append(filled(name, rows[name] / all));
  const again = planned && rows.moved ? "; some moved text will be computed again" : "";
  const note = `${percent(kept(rows), all)} reused${again}`;
  return block(
    `Prompt, ${plural(all, "token")}`,
    element("span", { class: "note" }, note),
    bar,
    ...legend.nodes,
  );
}

function spoken(rows, all) {
  return KINDS.filter((kind) => rows[kind.name])
    .map((kind) => `${kind.label} ${percent(rows[kind.name], all)}`)
    .join(", ");
}

function block(title, note, ...children) {
  return element(
    "section",
    { class: "block" },
    element("div", { class: "labelled" }, element("h3", {}, title), note),
    ...children,
  );
}

/** Pointing at a word, tapping it or walking to it with the keyboard explains it in a line below;
 * screen readers say the explanation with the word. */
class Legend {
  /** ``rows`` by kind; only kinds that have some are listed. */
  constructor(rows, all) {
    this.says = element("p", { class: "says", "aria-hidden": "true" }, HINT);
    this.list = element("ul", { class: "legend" });
    for (const kind of KINDS) {
      const number = rows[kind.name];
      if (!number) continue;
      this.add(kind, [
        element("span", { class: "amount" }, count(number)),
        element("span", { class: "share" }, percent(number, all)),
      ]);
    }
    this.nodes = [this.list, this.says];
  }

  /** Some of the prompt was healed: the colour is on the map. */
  heal() {
    if (!this.list.querySelector(".healed")) this.add(HEALED, []);
  }

  add(kind, numbers) {
    const spoken = element("span", { class: "off-screen", id: `says-${kind.name}` }, kind.says);
    const word = element(
      "button",
      { type: "button", class: "term", "aria-describedby": spoken.id },
      element("span", { class: `swatch fill ${kind.name}`, "aria-hidden": "true" }),
      element("b", {}, kind.label),
      ...numbers,
    );
    for (const event of ["pointerenter", "focus", "click"]) {
      word.addEventListener(event, () => say(this.says, kind.says));
    }
    for (const event of ["pointerleave", "blur"]) {
      word.addEventListener(event, () => say(this.says, HINT));
    }
    this.list.append(element("li", {}, word, spoken));
  }
}
