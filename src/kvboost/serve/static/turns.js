// A conversation on the page: questions, answers as Markdown, calls of tools, comparisons.

import { key } from "./api.js";
import { sidesOf, summary, verdict } from "./comparison.js";
import { button, copyButton, count, element, milliseconds, percent, plural, say } from "./dom.js";
import { markdown } from "./markdown.js";
import { curl, python } from "./snippets.js";

const REST = 4; // times as long as the last drawing took
const MOST_ARGUMENTS = 50_000; // characters

/** One turn. ``hooks``: ``onChoose`` shows its report, ``onResults`` sends results of its calls,
 * ``onDrawn`` is called when new text was drawn, ``onShown`` with the part that is new. */
export class TurnView {
  constructor(turn, hooks) {
    this.turn = turn;
    this.hooks = hooks;
    this.replies = element("div", { class: "replies" });
    this.verdict = element("p", { class: "verdict" });
    this.healing = element("p", { class: "meta healing", role: "status" });
    this.actions = element("div", { class: "actions turn-actions" });
    this.node = element(
      "article",
      { class: "turn", "aria-label": "Question and answer" },
      ...turn.added.map(asked),
      this.replies,
      this.verdict,
      this.healing,
      this.actions,
    );
    this.sides = [];
    this.isDue = false; // whether a piece waits to be drawn
    this.restsUntil = 0;
    this.draw();
  }

  /** Draws everything anew: another answer has begun, or one has ended. ``reading`` is shown in
   * place of the answer ``busy`` until that has text. */
  draw(busy = null, reading = null) {
    const sides = sidesOf(this.turn);
    this.sides = sides.map((side) => new Reply(side, side.answer === busy ? reading : null));
    this.replies.classList.toggle("two", sides.length > 1);
    this.replies.replaceChildren(...this.sides.map((side) => side.node));
    say(this.verdict, busy ? "" : verdict(this.turn));
    this.drawHealing();
    this.hooks.onShown(busy ? this.sides.find((side) => side.busy).node : this.verdict);
    this.actions.replaceChildren(...(busy || !this.turn.answer ? [] : this.buttons()));
  }

  /** A piece has come: draws it at the next frame. A long answer takes long to draw, so the page
   * rests longer before it draws the next piece. */
  piece() {
    if (this.isDue) return;
    this.isDue = true;
    const drawPiece = (began) => {
      this.isDue = false;
      for (const side of this.sides) if (side.busy) side.draw();
      this.hooks.onDrawn();
      const now = performance.now();
      this.restsUntil = now + REST * (now - began);
    };
    const rest = Math.max(0, this.restsUntil - performance.now());
    setTimeout(() => requestAnimationFrame(drawPiece), rest);
  }

  drawHealing() {
    say(this.healing, this.turn.healing ? healed(this.turn.healing) : "");
  }

  buttons() {
    const { answer, request } = this.turn;
    const base = new URL("v1", document.baseURI).href;
    const found = [copyButton("Copy answer", () => answer.content || JSON.stringify(answer.calls))];
    if (request) {
      found.push(copyButton("Copy as curl", () => curl(request, base, Boolean(key()))));
      found.push(copyButton("Copy as Python", () => python(request, base, Boolean(key()))));
    }
    if (answer.report) found.push(button("Show prompt", () => this.hooks.onChoose(this.turn)));
    return found;
  }

  /** Fields for the results of this turn's calls, while it is the last turn. */
  offerResults() {
    const { calls } = this.turn.answer;
    if (!calls.length) return;
    const fields = calls.map(({ name }) => {
      const label = `Result of ${name}`;
      return element("textarea", { rows: "2", "aria-label": label, placeholder: label });
    });
    const result = ({ id }, place) => ({
      role: "tool",
      tool_call_id: id,
      content: fields[place].value,
    });
    const send = button("Send results", () => this.hooks.onResults(calls.map(result)), null);
    this.actions.before(element("div", { class: "results" }, ...fields, send));
  }

  removeResults() {
    this.node.querySelector(".results")?.remove();
  }
}

/** One answer of a turn; null if it has not begun. ``reading`` shows how far its prompt is. */
class Reply {
  constructor({ answer, title, texts = "" }, reading) {
    this.answer = answer;
    this.isPair = title !== null;
    this.reading = reading;
    this.busy = reading !== null;
    this.body = element("div", { class: "answer", "aria-busy": this.busy });
    this.meta = element("p", { class: "meta" });
    this.time = element("p", { class: "time", hidden: "" }, element("b"), " to the first token");
    this.node = element("div", { class: "reply" }, this.body, this.meta);
    if (this.isPair) {
      const order = texts ? [element("p", { class: "texts" }, texts)] : [];
      this.body.before(element("h4", {}, title), ...order, this.time);
    }
    if (answer) this.draw();
    else this.body.append(element("p", { class: "waiting" }, "Comes next."));
  }

  draw() {
    const { content, reasoning, calls } = this.answer;
    const parts = [];
    if (reasoning) parts.push(thoughts(reasoning, this.body.querySelector("details")?.open));
    parts.push(...markdown(content), ...calls.map(callOf));
    if (!parts.length) parts.push(this.reading ?? element("p", { class: "waiting" }, "(no text)"));
    this.body.replaceChildren(...parts);
    const first = this.answer.report?.ttft_ms ?? this.answer.ttft;
    this.time.hidden = first === null;
    if (first !== null) say(this.time.firstChild, milliseconds(first));
    say(this.meta, this.busy ? "" : summary(this.answer, this.isPair));
  }
}

function asked(message) {
  if (message.role !== "tool") return element("p", { class: "asked" }, message.content);
  return element("p", { class: "asked" }, element("b", {}, "Result: "), message.content);
}

function thoughts(text, open = false) {
  return element("details", { open }, element("summary", {}, "Reasoning"), ...markdown(text));
}

/** A call as a line and a list of its arguments; text if they are not JSON (yet). */
function callOf({ name, arguments: given }) {
  const title = element("p", {}, "calls ", element("b", {}, name));
  return element(
    "div",
    { class: "call" },
    title,
    element("pre", { tabindex: "0", "aria-label": `Arguments of ${name}` }, pretty(given)),
  );
}

function pretty(json) {
  if (json.length > MOST_ARGUMENTS) return `${json.slice(0, MOST_ARGUMENTS)} …`;
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}

const HEALING = new Map([
  ["waiting", "Being made exact while the server is idle"],
  ["done", "Made exact since, while the server was idle"],
  ["replaced", "The conversation went on, and its next turn is made exact instead"],
  ["dropped", "No longer being made exact"],
  ["failed", "Making it exact failed"],
]);

function healed({ approximate_tokens: all, healed_tokens: done, status, audit }) {
  const state = HEALING.get(status) ?? status;
  const parts = [`${state}: ${count(done)} of ${plural(all, "approximate token")}.`];
  if (audit) {
    const kl = audit.mean_kl === null ? "" : ` (mean KL ${audit.mean_kl.toPrecision(2)})`;
    const agreed = `${percent(audit.agreement, 1)} of ${plural(audit.compared_tokens, "token")}`;
    parts.push(`Compared with exact text, the model chooses the same at ${agreed}${kl}.`);
  }
  return parts.join(" ");
}
