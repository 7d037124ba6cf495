// The prompt in order: a strip and the text, every span in the colour of its kind. Rows that were
// healed since turn into exact ones.

import { count, element, filled, percent, plural, walked } from "./dom.js";
import { kindOf } from "./kinds.js";

/** Rows ``[from, to)`` that have become exact in the cache, of rows that were not. */
export function healedRows(spans, healing) {
  const first = spans.find((span) => span.kind === "moved" || span.kind === "approximate");
  if (!first || !healing) return { from: 0, to: 0 };
  return { from: first.start, to: first.start + healing.healed_tokens };
}

/** Pointing at a span, tapping it, or walking to it with the arrow keys says more about it. */
export class PromptMap {
  constructor(spans, healing) {
    this.spans = spans;
    this.chosen = -1;
    this.strip = element("div", { class: "bar strip", "aria-hidden": "true" });
    this.text = element("div", {
      class: "prompt",
      role: "listbox",
      "aria-label": "Parts of the prompt",
    });
    this.detail = element("p", { class: "detail", role: "status" });
    const all = spans.at(-1).end;
    this.parts = spans.map((span, index) => new SpanParts(span, all, index));
    this.strip.append(...this.parts.map((part) => part.strip));
    this.text.append(...this.parts.map((part) => part.piece));
    this.listen();
    this.heal(healing);
    this.choose(0);
  }

  get nodes() {
    return [this.strip, this.detail, this.text];
  }

  heal(healing) {
    const rows = healedRows(this.spans, healing);
    for (const part of this.parts) part.heal(rows);
    if (this.chosen >= 0) this.describe();
  }

  listen() {
    const point = (event) => {
      const index = event.target.closest("[data-index]")?.dataset.index;
      if (index !== undefined && Number(index) !== this.chosen) this.choose(Number(index));
    };
    for (const area of [this.strip, this.text]) {
      area.addEventListener("pointerover", point);
      area.addEventListener("click", point);
    }
    this.strip.addEventListener("click", () =>
      this.parts[this.chosen]?.piece.scrollIntoView({ block: "nearest" }),
    );
    this.text.addEventListener("focusin", point);
    this.text.addEventListener("keydown", (event) => this.walk(event));
  }

  walk(event) {
    const to = walked(event, this.chosen, this.parts.length - 1, 1);
    if (to === undefined) return;
    event.preventDefault();
    this.choose(to);
    this.parts[to].piece.focus();
  }

  choose(index) {
    this.chosen = index;
    this.parts.forEach((part, place) => part.choose(place === index));
    this.describe();
  }

  describe() {
    this.detail.replaceChildren(...this.parts[this.chosen].described());
  }
}

/** One span: its part of the strip, and its text. */
class SpanParts {
  constructor(span, all, index) {
    this.span = span;
    this.healed = 0;
    this.strip = filled(span.kind, span.tokens / all);
    // How many rows of it were computed again, not which: they are drawn at its end.
    if (span.recomputed) this.strip.append(filled("recomputed", span.recomputed / span.tokens));
    this.cover = filled("healed", 0);
    this.strip.append(this.cover);
    this.tag = element("span", { class: "tag" });
    this.piece = element(
      "span",
      { class: `span ${span.kind}`, role: "option", tabindex: "-1" },
      this.tag,
      span.text ?? "",
    );
    this.strip.dataset.index = this.piece.dataset.index = index;
    this.name();
  }

  heal({ from, to }) {
    const { start, end, tokens } = this.span;
    this.healed = Math.max(0, Math.min(end, to) - Math.max(start, from));
    this.cover.style.width = `${(100 * this.healed) / tokens}%`;
    this.piece.classList.toggle("healed", this.healed === tokens);
    this.name();
  }

  name() {
    const { recomputed, tokens } = this.span;
    const again = recomputed ? `, ${count(recomputed)} again` : "";
    const since = this.healed
      ? `, ${this.healed === tokens ? "" : `${count(this.healed)} `}healed`
      : "";
    this.tag.textContent = `${this.label} ${count(tokens)}${again}${since}`;
  }

  get label() {
    return kindOf(this.span.kind).label;
  }

  choose(on) {
    this.piece.tabIndex = on ? 0 : -1;
    this.piece.ariaSelected = on;
    this.piece.classList.toggle("chosen", on);
    this.strip.classList.toggle("chosen", on);
  }

  described() {
    const { span } = this;
    const facts = [
      `tokens ${count(span.start)} to ${count(span.end - 1)}`,
      span.donor && `stored as ${span.donor.slice(0, 12)}${span.tier ? ` in ${span.tier}` : ""}`,
      span.kind === "moved" &&
        `at least ${percent(span.resemblance, 1)} of the text before it is the same as then`,
      span.recomputed &&
        `${count(span.recomputed)} of ${plural(span.tokens, "token")} computed again`,
      this.healed && `${count(this.healed)} exact in the cache since`,
    ].filter(Boolean);
    return [
      element("b", {}, this.label),
      ` ${plural(span.tokens, "token")}`,
      ...facts.map((fact) => ` · ${fact}`),
    ];
  }
}
