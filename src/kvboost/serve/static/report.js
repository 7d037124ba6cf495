// The report about a prompt: the time to the first token, rows by source, and the prompt itself.

import { count, element, milliseconds, percent, plural, sooner } from "./dom.js";
import { KINDS, kept, rowsByKind, total } from "./kinds.js";
import { PromptMap, filled, healedRows } from "./map.js";

/** Draws the report of a turn, and again what healing changes in it. */
export class ReportView {
  constructor(place) {
    this.place = place;
    this.turn = null;
    this.map = null;
    drawKey(place);
  }

  showTurn(turn) {
    this.turn = turn;
    this.draw(turn.answer.report, { answer: turn.answer, off: turn.off });
    this.heal();
  }

  /** A plan: nothing was run, so there is no time. */
  showPlan(report) {
    this.turn = null;
    this.draw(report, {});
  }

  clear() {
    this.turn = this.map = null;
    drawKey(this.place);
  }

  draw(report, { answer, off }) {
    const planned = !answer;
    const parts = [firstToken(report, answer, off), sources(report, planned)];
    this.map = null;
    if (report.spans?.length) {
      this.map = new PromptMap(report.spans, this.turn?.healing);
      this.healed = element("span", { class: "note" });
      parts.push(block("Prompt in order", this.healed, ...this.map.nodes));
      this.healed.textContent = plural(report.spans.length, "span");
    }
    if (report.notes?.length) {
      parts.push(
        element("ul", { class: "notes" }, ...report.notes.map((note) => element("li", {}, note))),
      );
    }
    this.place.replaceChildren(...parts);
  }

  /** Something has become of this turn's approximate rows. */
  heal() {
    const { map, turn } = this;
    if (!map || !turn?.healing) return;
    map.heal(turn.healing);
    const all = map.spans.at(-1).end;
    const { from, to } = healedRows(map.spans, turn.healing);
    const done = count(Math.min(to, all) - from);
    const healed = `${done} of ${plural(all - from, "approximate row")} healed`;
    this.healed.textContent = `${plural(map.spans.length, "span")}, ${healed}`;
  }
}

/** Shown before the first answer: an explanation of the words. */
function drawKey(place) {
  place.replaceChildren(
    element("h3", {}, "Where a prompt comes from"),
    element(
      "p",
      { class: "lead" },
      "Ask something, or take an example: the first question reads the text, the next one does " +
        "not have to. Every row of the prompt is one of these:",
    ),
    element("ul", { class: "legend key" }, ...KINDS.map(explained), explained(HEALED)),
  );
}

const HEALED = {
  name: "healed",
  label: "healed",
  says: "was computed on moved text; computed exactly since, while the server was idle",
};

function explained(kind) {
  const says = element("span", { class: "says" }, kind.says);
  return element("li", {}, swatch(kind), element("b", {}, kind.label), says);
}

/** Bars of measured times, or of an estimate where nothing was measured. */
function firstToken(report, answer, off) {
  const estimate = report.estimated_ms_without_reuse;
  const times = [];
  if (answer) {
    times.push(["this request", "measured", report.ttft_ms, report.queue_ms ?? 0]);
    if (answer.seen !== null) times.push(["seen here", "seen", answer.seen, 0]);
  }
  if (off?.report) {
    times.push(["without reuse", "measured", off.report.ttft_ms, off.report.queue_ms ?? 0]);
    times.push(["seen here", "seen", off.seen, 0]);
  } else if (estimate) {
    times.push(["without reuse, estimated", "estimated", estimate, 0]);
  }
  const longest = Math.max(...times.map(([, , value]) => value), 1e-9);
  const shown = block(
    "First token",
    element("span", { class: "note" }, headline(report, answer, off)),
    element("div", { class: "lines" }, ...times.map((time) => line(time, longest))),
  );
  shown.classList.add("first");
  return shown;
}

function headline(report, answer, off) {
  if (!answer) return "a plan: nothing was run";
  if (off?.report) return `${sooner(off.report.ttft_ms / report.ttft_ms)}, measured`;
  const estimate = report.estimated_ms_without_reuse;
  return estimate ? sooner(estimate / report.ttft_ms) : "no estimate yet: too little has run";
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

function sources(report, planned) {
  const rows = rowsByKind({
    exact: report.exact_tokens,
    approximate: report.approximate_tokens,
    moved: report.moved_tokens,
    recomputed: report.recomputed_tokens ?? 0, // not known in a plan
    computed: report.computed_tokens,
  });
  const all = total(rows);
  const bar = element("div", { class: "bar thick", role: "img", "aria-label": spoken(rows, all) });
  const legend = element("ul", { class: "legend" });
  for (const kind of KINDS) {
    const number = rows[kind.name];
    if (!number) continue;
    bar.append(filled(kind.name, number / all));
    legend.append(
      element(
        "li",
        {},
        swatch(kind),
        element("b", {}, kind.label),
        element("span", { class: "amount" }, count(number)),
        element("span", { class: "share" }, percent(number, all)),
      ),
    );
  }
  const again = planned && rows.moved ? "; which moved rows to mend is decided when it runs" : "";
  const note = `${percent(kept(rows), all)} not ${planned ? "to be read" : "read"} again${again}`;
  return block(
    `Prompt, ${plural(all, "row")}`,
    element("span", { class: "note" }, note),
    bar,
    legend,
  );
}

function spoken(rows, all) {
  return KINDS.filter((kind) => rows[kind.name])
    .map((kind) => `${kind.label} ${percent(rows[kind.name], all)}`)
    .join(", ");
}

function swatch(kind) {
  return element("span", { class: `swatch fill ${kind.name}`, "aria-hidden": "true" });
}

function block(title, note, ...children) {
  return element(
    "section",
    { class: "block" },
    element("div", { class: "labelled" }, element("h3", {}, title), note),
    ...children,
  );
}
