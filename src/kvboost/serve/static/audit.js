// How much of what was computed on moved text is exact by now, and how far answers were from exact
// ones.

import { Chart } from "./charts.js";
import { count, element, percent, plural } from "./dom.js";
import { gauge } from "./gauges.js";

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
