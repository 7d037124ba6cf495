// Charts of requests. They are drawn in pixels, and again when their width changes.

import { count, element, median, milliseconds, percent, svg, timeOfDay, walked } from "./dom.js";
import { KINDS, kept, rowsByKind, total } from "./kinds.js";

export const HEIGHT = 168;
export const MARGIN = { top: 10, right: 6, bottom: 20, left: 46 };
const MOST_COLUMNS = 60;
const FEWEST_COLUMNS = 12;
const COLUMN = 7; // the least width of one, in pixels

/** A titled figure whose ``draw(width)`` is called when it gets data or another width. */
export class Chart {
  constructor(place, title, legend = []) {
    this.note = element("span", { class: "note" });
    this.body = element("div", { class: "plot" });
    const marks = legend.map(([kind, label]) =>
      element("span", {}, element("i", { class: `mark ${kind}` }), label),
    );
    place.append(
      element(
        "figure",
        { class: "panel chart" },
        element("figcaption", { class: "labelled" }, element("h3", {}, title), this.note),
        this.body,
        ...(marks.length
          ? [element("p", { class: "marks", "aria-hidden": "true" }, ...marks)]
          : []),
      ),
    );
    new ResizeObserver(() => this.redraw()).observe(this.body);
  }

  redraw() {
    const width = Math.floor(this.body.clientWidth);
    if (width > 100) this.draw(width);
  }
}

/** One column per request, newest at the right; a cursor walks them by pointer or arrow keys. */
class RequestChart extends Chart {
  constructor(place, title, legend, cursor) {
    super(place, title, legend);
    this.requests = null; // not known yet
    this.shown = []; // the newest of them, as many as fit
    this.cursor = cursor;
    this.canvas = svg("svg", {
      height: HEIGHT,
      tabindex: "0",
      role: "slider",
      "aria-label": `${title}: request`,
    });
    this.body.append(this.canvas);
    for (const kind of ["pointermove", "pointerdown"]) {
      this.canvas.addEventListener(kind, (event) =>
        cursor.set(this.shown[this.columnAt(event)]?.seq),
      );
    }
    this.canvas.addEventListener("pointerleave", () => cursor.set(null));
    this.canvas.addEventListener("blur", () => cursor.set(null));
    this.canvas.addEventListener("keydown", (event) => this.walk(event));
    cursor.addEventListener("moved", () => this.redraw());
  }

  update(requests) {
    this.requests = requests;
    this.redraw();
  }

  draw(width) {
    const inner = width - MARGIN.left - MARGIN.right;
    const fitting = Math.min(MOST_COLUMNS, Math.floor(inner / COLUMN));
    this.shown = this.requests?.slice(-fitting) ?? [];
    this.step = inner / Math.max(this.shown.length, FEWEST_COLUMNS);
    const at = this.shown.findIndex((request) => request.seq === this.cursor.seq);
    const chosen = this.shown[at];
    this.canvas.setAttribute("width", width);
    this.canvas.replaceChildren();
    if (!this.shown.length) {
      if (this.requests)
        this.canvas.append(label(width / 2, HEIGHT / 2, "no request yet", "middle"));
    } else {
      if (chosen)
        this.canvas.append(rect("cursor", this.left(at), MARGIN.top, this.step, plotHeight()));
      this.drawColumns(width);
      this.canvas.append(label(MARGIN.left, HEIGHT - 5, timeOfDay(this.shown[0].at), "start"));
      const end = this.left(this.shown.length);
      if (end - MARGIN.left > 130) {
        this.canvas.append(label(end, HEIGHT - 5, timeOfDay(this.shown.at(-1).at), "end"));
      }
    }
    this.note.textContent = chosen ? this.said(chosen) : this.summary();
    this.note.classList.toggle("pointed", Boolean(chosen));
    const place = chosen ? at + 1 : this.shown.length;
    this.canvas.setAttribute("aria-valuemin", Math.min(1, this.shown.length));
    this.canvas.setAttribute("aria-valuemax", this.shown.length);
    this.canvas.setAttribute("aria-valuenow", place);
    this.canvas.setAttribute("aria-valuetext", this.note.textContent);
  }

  left(index) {
    return MARGIN.left + index * this.step;
  }

  columnAt(event) {
    const x = event.clientX - this.canvas.getBoundingClientRect().left - MARGIN.left;
    return Math.max(0, Math.min(this.shown.length - 1, Math.floor(x / this.step)));
  }

  walk(event) {
    const last = this.shown.length - 1;
    const at = this.shown.findIndex((request) => request.seq === this.cursor.seq);
    const to = walked(event, at, last, -1);
    if (to === undefined || last < 0) return;
    event.preventDefault();
    this.cursor.set(this.shown[to].seq);
  }
}

/** The number of the request that all charts point at; null for none. */
export class Cursor extends EventTarget {
  seq = null;

  set(seq) {
    if ((seq ?? null) === this.seq) return;
    this.seq = seq ?? null;
    this.dispatchEvent(new Event("moved"));
  }
}

/** Logarithmic: the distance from mark to mark is the factor, whatever the length of the prompt. */
export class LatencyChart extends RequestChart {
  constructor(place, cursor) {
    const legend = [
      ["dot", "first token"],
      ["ring", "whole request"],
      ["dash", "first token without reuse, estimated"],
      ["worse", "later than estimated"],
    ];
    super(place, "Latency", legend, cursor);
  }

  drawColumns(width) {
    const values = this.shown
      .flatMap((request) => [request.ttft_ms, request.total_ms, request.estimated_ms])
      .filter((value) => value > 0);
    if (!values.length) return;
    const low = Math.log(Math.min(...values) / 1.3);
    const high = Math.log(Math.max(...values) * 1.3);
    const y = (value) => MARGIN.top + plotHeight() * (1 - (Math.log(value) - low) / (high - low));
    for (const tick of logTicks(Math.exp(low), Math.exp(high))) {
      this.canvas.append(
        ...grid(width, y(tick), tick < 1000 ? milliseconds(tick) : `${tick / 1000} s`),
      );
    }
    this.shown.forEach((request, index) => {
      const x = this.left(index) + this.step / 2;
      this.canvas.append(...this.marks(request, x, y));
    });
  }

  marks({ ttft_ms: measured, total_ms: whole, estimated_ms: estimate }, x, y) {
    const found = [];
    const line = (kind, x1, x2, from, to) =>
      found.push(svg("line", { class: kind, x1, x2, y1: y(from), y2: y(to) }));
    if (measured > 0 && estimate > 0) {
      line(measured <= estimate ? "stem" : "stem worse", x, x, measured, estimate);
    }
    if (estimate > 0) {
      const half = Math.min(this.step / 2 - 1, 6);
      line("dash", x - half, x + half, estimate, estimate);
    }
    if (whole > 0) found.push(svg("circle", { class: "ring", cx: x, cy: y(whole), r: 2.5 }));
    if (measured > 0) found.push(svg("circle", { class: "dot", cx: x, cy: y(measured), r: 3 }));
    return found;
  }

  said({ at, ttft_ms: measured, total_ms: whole, estimated_ms: estimate, finish_reason: reason }) {
    const parts = [
      measured > 0 ? `first token ${milliseconds(measured)}` : "no first token",
      estimate > 0 && `estimated ${milliseconds(estimate)}`,
      `whole ${milliseconds(whole)}`,
      !["stop", "length"].includes(reason) && reason,
    ];
    return `${timeOfDay(at)} ${parts.filter(Boolean).join(", ")}`;
  }

  summary() {
    const measured = median(
      this.shown.map((request) => request.ttft_ms).filter((value) => value > 0),
    );
    if (measured === null) return "";
    const whole = median(this.shown.map((request) => request.total_ms));
    return `median first token ${milliseconds(measured)}; whole ${milliseconds(whole)}`;
  }
}

export class SourcesChart extends RequestChart {
  constructor(place, cursor) {
    const legend = KINDS.map((kind) => [`fill ${kind.name}`, kind.label]);
    super(place, "Prompt tokens by source", legend, cursor);
  }

  drawColumns(width) {
    const columns = this.shown.map(rowsByKind);
    const ticks = linearTicks(Math.max(1, ...columns.map(total)));
    const y = (value) => MARGIN.top + plotHeight() * (1 - value / ticks.at(-1));
    for (const tick of ticks) this.canvas.append(...grid(width, y(tick), count(tick)));
    const gap = this.step > 10 ? 2 : 1;
    columns.forEach((rows, index) => {
      let top = 0;
      for (const { name } of KINDS) {
        const number = rows[name];
        if (!number) continue;
        const height = y(top) - y(top + number);
        this.canvas.append(
          rect(name, this.left(index) + gap / 2, y(top + number), this.step - gap, height),
        );
        top += number;
      }
    });
  }

  said(request) {
    const rows = rowsByKind(request);
    const parts = KINDS.filter(({ name }) => rows[name]).map(
      ({ name, label }) => `${label} ${count(rows[name])}`,
    );
    return parts.join(", ");
  }

  summary() {
    const rows = this.shown.map(rowsByKind);
    const all = rows.reduce((sum, one) => sum + total(one), 0);
    const reused = rows.reduce((sum, one) => sum + kept(one), 0);
    return all ? `${percent(reused, all)} reused` : "";
  }
}

export function plotHeight() {
  return HEIGHT - MARGIN.top - MARGIN.bottom;
}

/** A grid line and its value. */
export function grid(width, y, text) {
  return [
    svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y }),
    label(MARGIN.left - 6, y + 4, text, "end"),
  ];
}

export function label(x, y, text, anchor) {
  return svg("text", { x, y, "text-anchor": anchor }, text);
}

/** Kinds with a pattern take it from the page's own <defs>. */
function rect(kind, x, y, width, height) {
  const pattern = { recomputed: "url(#stripes)", approximate: "url(#lines)" }[kind];
  return svg("rect", { class: kind, x, y, width, height, fill: pattern });
}

/** Round numbers from 0 past ``most``, two to five of them. */
export function linearTicks(most) {
  const rough = most / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(
    1,
    [1, 2, 5, 10].map((times) => times * power).find((size) => size >= rough),
  );
  const ticks = [0];
  while (ticks.at(-1) < most) ticks.push(ticks.at(-1) + step);
  return ticks;
}

/** 1, 2 and 5 times each power of ten in between, or only 1 if there are many. */
function logTicks(low, high) {
  const all = [];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power += 1) {
    for (const times of [1, 2, 5]) all.push({ times, value: times * 10 ** power });
  }
  const inside = all.filter(({ value }) => value >= low && value <= high);
  const kept = inside.length > 8 ? inside.filter(({ times }) => times === 1) : inside;
  return kept.map(({ value }) => value);
}
