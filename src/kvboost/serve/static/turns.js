// A conversation on the page: questions, answers as Markdown, calls of tools, comparisons.

import { key } from "./api.js";
import { copyButton } from "./clipboard.js";
import { compared, summary } from "./comparison.js";
import { count, element, percent, plural, say } from "./dom.js";
import { markdown } from "./markdown.js";
import { curl, python } from "./snippets.js";

/** One turn. ``hooks``: ``onChoose`` shows its report, ``onResults`` sends results of its calls,
 * ``onDrawn`` is called when new text was drawn. */
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
    this.frame = null;
    this.draw();
  }

  /** Draws everything anew: another answer has begun, or one has ended. */
  draw(busy = null) {
    const { answer, off } = this.turn;
    const answers = [answer, off].filter(Boolean);
    this.sides = answers.map((one, place) => {
      const title = answers.length > 1 ? ["With reuse", "Without reuse"][place] : null;
      return new Reply(one, title, one === busy);
    });
    this.replies.classList.toggle("two", answers.length > 1);
    this.replies.replaceChildren(...this.sides.map((side) => side.node));
    say(this.verdict, off && !busy ? compared(answer, off) : "");
    this.drawHealing();
    this.actions.replaceChildren(...(busy ? [] : this.buttons()));
  }

  /** A piece has come: draws it at the next frame. */
  piece() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      for (const side of this.sides) if (side.busy) side.draw();
      this.hooks.onDrawn();
    });
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
    if (answer.report) {
      const show = element("button", { type: "button", class: "quiet" }, "Show prompt");
      show.addEventListener("click", () => this.hooks.onChoose(this.turn));
      found.push(show);
    }
    return found;
  }

  /** Fields for the results of this turn's calls, while it is the last turn. */
  offerResults() {
    const { calls } = this.turn.answer;
    if (!calls.length) return;
    const fields = calls.map((call) =>
      element("textarea", {
        rows: "2",
        "aria-label": `Result of ${call.name}`,
        placeholder: `Result of ${call.name}`,
      }),
    );
    const send = element("button", { type: "button" }, "Send results");
    send.addEventListener("click", () => {
      const results = calls.map(({ id }, place) => ({
        role: "tool",
        tool_call_id: id,
        content: fields[place].value,
      }));
      this.hooks.onResults(results);
    });
    this.actions.before(element("div", { class: "results" }, ...fields, send));
  }

  removeResults() {
    this.node.querySelector(".results")?.remove();
  }
}

/** One answer of a turn. */
class Reply {
  constructor(answer, title, busy) {
    this.answer = answer;
    this.busy = busy;
    this.body = element("div", { class: "answer", "aria-busy": busy });
    this.meta = element("p", { class: "meta" });
    const head = title ? [element("h4", {}, title)] : [];
    this.node = element("div", { class: "reply" }, ...head, this.body, this.meta);
    this.draw();
  }

  draw() {
    const { content, reasoning, calls } = this.answer;
    const parts = [];
    if (reasoning) parts.push(thoughts(reasoning, this.body.querySelector("details")?.open));
    parts.push(...markdown(content), ...calls.map(callOf));
    if (!parts.length)
      parts.push(
        element("p", { class: "waiting" }, this.busy ? "Reading the prompt …" : "(no text)"),
      );
    this.body.replaceChildren(...parts);
    say(this.meta, this.busy ? "" : summary(this.answer));
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
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}

function healed({ approximate_tokens: all, healed_tokens: done, status, audit }) {
  const rows = `${count(done)} of ${count(all)} approximate rows are exact in the cache by now`;
  const state = {
    waiting: "Healing",
    done: "Healed",
    dropped: "Healing was dropped",
    failed: "Healing failed",
  };
  const parts = [`${state[status]}: ${rows}.`];
  if (audit) {
    const kl = audit.mean_kl === null ? "" : `, mean KL ${audit.mean_kl.toPrecision(2)}`;
    const agreed = `${percent(audit.agreement, 1)} of ${plural(audit.compared_tokens, "token")}`;
    parts.push(`Audit: the likeliest token is that of an exact prompt at ${agreed}${kl}.`);
  }
  return parts.join(" ");
}
