// Shared parts of charts: their size, grid lines, and round numbers beside them.

import { svg } from "./dom.js";

export const HEIGHT = 168;
export const MARGIN = { top: 10, right: 6, bottom: 20, left: 46 };

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
export function rect(kind, x, y, width, height) {
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
export function logTicks(low, high) {
  const all = [];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power += 1) {
    for (const times of [1, 2, 5]) all.push({ times, value: times * 10 ** power });
  }
  const inside = all.filter(({ value }) => value >= low && value <= high);
  const kept = inside.length > 8 ? inside.filter(({ times }) => times === 1) : inside;
  return kept.map(({ value }) => value);
}
