// The state of the server: its tiers and its queue, what of moved text was made exact and how far
// answers were from exact ones, the model and the machine.

import { Chart, HEIGHT, MARGIN, grid, label, linearTicks, plotHeight } from "./charts.js";
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
function gauge(name, facts, share, kind) {
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

/** Three gauges: tokens that were healed, tokens that agree, and the KL of answers. */
export class AuditGauge extends Chart {
  constructor(place) {
    super(place, "Healing and audit");
  }

  update(healing, audit) {
    this.healing = healing;
    this.audit = audit;
    this.redraw();
  }

  draw() {
    if (!this.healing) return;
    const { audited } = this.audit;
    this.note.textContent = audited
      ? `${plural(audited, "answer")} audited`
      : "no answer audited yet";
    this.body.replaceChildren(
      healedGauge(this.healing),
      ...(audited ? [agreementGauge(this.audit), divergenceGauge(this.audit)] : [nothing()]),
    );
  }
}

function nothing() {
  return element(
    "p",
    { class: "meta" },
    "Answers over moved text are healed while the server is idle, and compared with exact ones.",
  );
}

function healedGauge({
  approximate_tokens: all,
  healed_tokens: done,
  waiting,
  tokens_per_second: pace,
  readings_waiting: readings,
}) {
  const facts = [
    all ? `${count(done)} of ${plural(all, "token")}` : "no approximate token yet",
    waiting && `${plural(waiting, "conversation")} waiting`,
    pace && `${count(pace)} tokens per second`,
    readings && `${plural(readings, "document reading")} waiting`,
  ];
  return gauge("approximate tokens healed", facts, all ? done / all : 0, "healed");
}

function agreementGauge({
  token_agreement: agreement,
  compared_tokens: tokens,
  same_answers: same,
}) {
  const facts = [
    `${percent(agreement, 1)} of ${plural(tokens, "token")}`,
    `${percent(same, 1)} of answers wholly`,
  ];
  return gauge("same likeliest token", facts, agreement, "measured");
}

/** From 0 to twice the limit, or to the worst answer if that is further. */
function divergenceGauge({
  mean_kl: mean,
  max_kl: worst,
  max_audit_kl: limit,
  recompute_ratio: ratio,
}) {
  if (mean === null) return "";
  const end = Math.max(2 * (limit ?? 0), worst, 0.01);
  const facts = [
    `mean ${kl(mean)}`,
    `worst ${kl(worst)}`,
    limit !== null && `limit ${kl(limit)}`,
    `${percent(ratio, 1)} of moved tokens computed again`,
  ];
  const kind = limit !== null && mean > limit ? "over" : "measured";
  const drawn = gauge("KL from exact answers", facts, mean / end, kind);
  const bar = drawn.querySelector(".bar");
  bar.append(tick("worst", worst / end));
  if (limit !== null) bar.append(tick("limit", limit / end));
  return drawn;
}

function kl(value) {
  return value >= 0.001 || value === 0
    ? String(Number(value.toPrecision(2)))
    : value.toExponential(1);
}

function tick(kind, share) {
  const node = element("i", { class: `tick ${kind}`, title: kind });
  node.style.left = `${100 * Math.min(1, share)}%`;
  return node;
}

export class FactsPanel extends Chart {
  constructor(place) {
    super(place, "Model and machine");
    this.shown = "";
  }

  update(live) {
    const lines = described(live);
    const text = JSON.stringify(lines);
    if (text === this.shown) return; // so that a selection in it survives
    this.shown = text;
    const rows = lines.map(([name, value]) =>
      element("div", {}, element("dt", {}, name), element("dd", {}, value)),
    );
    this.body.replaceChildren(element("dl", { class: "facts" }, ...rows));
  }

  draw() {}
}

function described({ model, context_length: context, version, facts, tiers }) {
  const precise =
    facts.kv_cache_bits && facts.kv_cache_bits < 16 ? `, kept in ${facts.kv_cache_bits} bits` : "";
  const rows = {
    Model: [model, facts.architecture, facts.parameters && `${millions(facts.parameters)} parameters`],
    Numbers: [facts.dtype, facts.layers && `${count(facts.layers)} layers`],
    Context: [context ? `${count(context)} tokens` : "no limit"],
    KV: [
      facts.kv_bytes_per_token && `${bytes(facts.kv_bytes_per_token)} per token${precise}`,
      facts.chunk_size && `chunks of ${count(facts.chunk_size)} tokens`,
    ],
    Device: [
      facts.device,
      facts.device_name,
      facts.threads && `${count(facts.threads)} threads`,
      facts.memory_bytes && `${bytes(facts.memory_bytes)} of memory`,
    ],
    Kernels: [facts.kernels],
    Tiers: Object.entries(tiers).map(tierOf),
    Repair: [facts.recompute_strategy, facts.heal && `healing ${facts.heal}`],
    Version: [`kvboost ${version}`],
  };
  return Object.entries(rows)
    .map(([name, values]) => [name, values.filter(Boolean).join(" · ")])
    .filter(([, value]) => value);
}

function tierOf([name, { max_bytes: most, state }]) {
  if (most) return `${name} ${bytes(most)}`;
  return state && name; // without a limit of its own
}

function millions(number) {
  return number >= 1e9 ? `${(number / 1e9).toFixed(1)} billion` : `${count(number / 1e6)} million`;
}
