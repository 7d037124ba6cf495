// The state of the server: its tiers and its queue.

import { HEIGHT, MARGIN, grid, label, linearTicks, plotHeight } from "./axes.js";
import { Chart } from "./charts.js";
import { bytes, count, duration, element, filled, percent, plural, svg } from "./dom.js";

/** Bytes of every tier's budget, and of the budget of running requests. */
export class TiersChart extends Chart {
  constructor(place) {
    super(place, "Memory by tier");
    this.lines = [];
  }

  update(tiers, queue) {
    this.lines = Object.entries(tiers)
      .filter(([, tier]) => Number.isFinite(tier.bytes))
      .map(([name, tier]) => ({ name, ...tier }));
    if (queue.max_kv_bytes) {
      this.lines.push({
        name: "running requests",
        bytes: queue.kv_bytes,
        max_bytes: queue.max_kv_bytes,
      });
    }
    this.redraw();
  }

  draw() {
    this.body.replaceChildren(...this.lines.map(tierLine));
    const chunks = this.lines.reduce((most, tier) => Math.max(most, tier.chunks ?? 0), 0);
    this.note.textContent = this.lines.length ? plural(chunks, "chunk") : "";
  }
}

function tierLine({ name, bytes: held, max_bytes: most, chunks, state }) {
  const facts = [
    most ? `${bytes(held)} of ${bytes(most)}` : bytes(held),
    most ? percent(held, most) : "no budget of its own",
    chunks !== undefined && plural(chunks, "chunk"),
    state && state !== "closed" && `connection ${state}`,
  ];
  return gauge(name, facts, most ? held / most : 0, "measured");
}

/** A name, its facts, and a bar of which a share is filled. */
export function gauge(name, facts, share, kind) {
  return element(
    "div",
    { class: "tier" },
    element("span", { class: "of" }, name),
    element("span", { class: "value" }, facts.filter(Boolean).join(" · ")),
    element("span", { class: "bar gauge" }, ...(share ? [filled(kind, Math.min(1, share))] : [])),
  );
}

/** Running and waiting requests, one point per reply. */
export class QueueChart extends Chart {
  static SECONDS = 300;
  static GAP = 8; // a pause of so many seconds is drawn as a gap

  constructor(place) {
    super(place, "Queue", [["area", "running"], ["wave", "waiting"]]);
    this.canvas = svg("svg", { height: HEIGHT, role: "img" });
    this.body.append(this.canvas);
    this.samples = [];
  }

  update(now, queue) {
    this.queue = queue;
    this.samples.push({ at: now, running: queue.running, waiting: queue.waiting });
    this.samples = this.samples.filter((sample) => sample.at > now - QueueChart.SECONDS);
    this.redraw();
  }

  draw(width) {
    this.canvas.setAttribute("width", width);
    this.canvas.replaceChildren();
    if (!this.samples.length) return;
    const now = this.samples.at(-1).at;
    const most = Math.max(1, ...this.samples.flatMap((sample) => [sample.running, sample.waiting]));
    const ticks = linearTicks(most);
    const y = (value) => MARGIN.top + plotHeight() * (1 - value / ticks.at(-1));
    const x = (at) =>
      width -
      MARGIN.right -
      ((width - MARGIN.left - MARGIN.right) * (now - at)) / QueueChart.SECONDS;
    for (const tick of ticks) this.canvas.append(...grid(width, y(tick), count(tick)));
    for (const run of unbroken(this.samples)) {
      const running = steps(run, x, (sample) => y(sample.running));
      const closed = `${running} V ${y(0)} H ${x(run[0].at)} Z`;
      this.canvas.append(
        svg("path", { class: "area", d: closed }),
        svg("path", { class: "wave", d: steps(run, x, (sample) => y(sample.waiting)) }),
      );
    }
    this.canvas.append(
      label(MARGIN.left, HEIGHT - 5, `${duration(QueueChart.SECONDS)} ago`, "start"),
      label(width - MARGIN.right, HEIGHT - 5, "now", "end"),
    );
    const { running, waiting, max_running: mostRunning, max_waiting: mostWaiting } = this.queue;
    const inside = `${running} of ${mostRunning} running`;
    this.note.textContent = `${inside}, ${waiting} of ${mostWaiting} waiting`;
    this.canvas.setAttribute("aria-label", this.note.textContent);
  }
}

function unbroken(samples) {
  const runs = [[]];
  for (const sample of samples) {
    const before = runs.at(-1).at(-1);
    if (before && sample.at - before.at > QueueChart.GAP) runs.push([]);
    runs.at(-1).push(sample);
  }
  return runs;
}

function steps(samples, x, y) {
  const rest = samples.slice(1).map((sample) => `H ${x(sample.at)} V ${y(sample)}`);
  return [`M ${x(samples[0].at)} ${y(samples[0])}`, ...rest].join(" ");
}
