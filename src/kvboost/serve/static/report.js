// The report about a prompt: the time to the first token, rows by source, and the prompt with every
// span in the colour of its kind.

import { count, element, milliseconds, percent, plural, sooner } from "./dom.js";
import { KINDS, kept, rowsByKind, total } from "./kinds.js";

/** Draws a ``kvboost`` object. ``planned``: nothing was run, so there is no time. */
export function drawReport(place, report, planned = false) {
  const rows = rowsByKind({
    exact: report.exact_tokens,
    approximate: report.approximate_tokens,
    moved: report.moved_tokens,
    recomputed: report.recomputed_tokens ?? 0, // not known in a plan
    computed: report.computed_tokens,
  });
  const parts = [firstToken(report, planned), sources(rows, planned)];
  if (report.spans?.length) parts.push(promptMap(report.spans));
  if (report.notes?.length) {
    parts.push(
      element("ul", { class: "notes" }, ...report.notes.map((note) => element("li", {}, note))),
    );
  }
  place.replaceChildren(...parts);
}

/** Shown before the first answer: an explanation of the words. */
export function drawKey(place) {
  place.replaceChildren(
    element(
      "p",
      { class: "lead" },
      "Ask something, or take an example: the first question reads the " +
        "text, the next one does not have to. Every row of the prompt is one of these:",
    ),
    element(
      "ul",
      { class: "legend key" },
      ...KINDS.map((kind) =>
        element(
          "li",
          {},
          swatch(kind),
          element("b", {}, kind.label),
          element("span", { class: "says" }, kind.says),
        ),
      ),
    ),
  );
}

function firstToken(report, planned) {
  const estimate = report.estimated_ms_without_reuse;
  const longest = Math.max(planned ? 0 : report.ttft_ms, estimate ?? 0, 1e-9);
  const lines = [];
  if (!planned) {
    const queued = Math.min(report.queue_ms ?? 0, report.ttft_ms);
    const bar = element("span", { class: "bar" });
    if (queued >= 1) bar.append(part("queued", queued / longest));
    bar.append(part("measured", (report.ttft_ms - queued) / longest));
    const waited = queued >= 1 ? ` (${milliseconds(queued)} queued)` : "";
    lines.push(line("this request", bar, milliseconds(report.ttft_ms) + waited));
  }
  if (estimate) {
    const bar = element("span", { class: "bar" }, part("estimated", estimate / longest));
    lines.push(line("without reuse, estimated", bar, milliseconds(estimate)));
  }
  const shown = block(
    "First token",
    headline(report, estimate, planned),
    element("div", { class: "lines" }, ...lines),
  );
  shown.classList.add("first");
  return shown;
}

function headline({ ttft_ms: ttft }, estimate, planned) {
  if (planned) return "a plan: nothing was run";
  if (!estimate) return "no estimate yet: too little has run";
  return sooner(estimate / ttft);
}

function line(label, bar, value) {
  return element(
    "div",
    { class: "line" },
    element("span", { class: "of" }, label),
    bar,
    element("span", { class: "value" }, value),
  );
}

function part(kind, share) {
  const node = element("span", { class: `fill ${kind}` });
  node.style.width = `${100 * share}%`;
  return node;
}

function sources(rows, planned) {
  const all = total(rows);
  const bar = element("div", { class: "bar thick", role: "img", "aria-label": spoken(rows, all) });
  const legend = element("ul", { class: "legend" });
  for (const kind of KINDS) {
    const number = rows[kind.name];
    if (!number) continue;
    bar.append(part(kind.name, number / all));
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
  return block(
    `Prompt, ${plural(all, "row")}`,
    `${percent(kept(rows), all)} not ${planned ? "to be read" : "read"} again${again}`,
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
    element(
      "div",
      { class: "labelled" },
      element("h3", {}, title),
      element("span", { class: "note" }, note),
    ),
    ...children,
  );
}

/** A strip and the text, both in the prompt's order. Pointing at a span, tapping it, or walking to
 * it with the arrow keys says more about it. */
function promptMap(spans) {
  const all = spans.at(-1).end;
  const strip = element("div", { class: "bar strip", "aria-hidden": "true" });
  const text = element("div", {
    class: "prompt",
    role: "listbox",
    "aria-label": "Spans of the prompt",
  });
  const detail = element("p", { class: "detail", role: "status" });
  const pieces = spans.map((span, index) => {
    strip.append(stripPart(span, all, index));
    const piece = textPart(span, index);
    text.append(piece);
    return piece;
  });

  let chosen = -1;
  const choose = (index, focus = false) => {
    pieces[chosen]?.classList.remove("chosen");
    strip.children[chosen]?.classList.remove("chosen");
    pieces.forEach((piece, place) => {
      piece.tabIndex = place === index ? 0 : -1;
      piece.ariaSelected = place === index;
    });
    chosen = index;
    pieces[index].classList.add("chosen");
    strip.children[index].classList.add("chosen");
    detail.replaceChildren(...described(spans[index]));
    if (focus) pieces[index].focus();
  };
  const point = (event) => {
    const index = event.target.closest("[data-index]")?.dataset.index;
    if (index !== undefined && Number(index) !== chosen) choose(Number(index));
  };
  for (const area of [strip, text]) {
    area.addEventListener("pointerover", point);
    area.addEventListener("click", point);
  }
  strip.addEventListener("click", () => pieces[chosen]?.scrollIntoView({ block: "nearest" }));
  text.addEventListener("focusin", point);
  text.addEventListener("keydown", (event) => {
    const last = pieces.length - 1;
    const to = {
      ArrowRight: Math.min(chosen + 1, last),
      ArrowDown: Math.min(chosen + 1, last),
      ArrowLeft: Math.max(chosen - 1, 0),
      ArrowUp: Math.max(chosen - 1, 0),
      Home: 0,
      End: last,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    choose(to, true);
  });
  choose(0);
  return block("Prompt in order", plural(spans.length, "span"), strip, detail, text);
}

/** The recomputed share of a moved span is striped, at its end: how much, not which rows. */
function stripPart(span, all, index) {
  const node = part(span.kind, span.tokens / all);
  node.dataset.index = index;
  if (span.recomputed) node.append(part("recomputed", span.recomputed / span.tokens));
  return node;
}

function textPart(span, index) {
  const again = span.recomputed ? `, ${count(span.recomputed)} again` : "";
  const tag = element("span", { class: "tag" }, `${kindLabel(span)} ${count(span.tokens)}${again}`);
  const piece = element(
    "span",
    { class: `span ${span.kind}`, role: "option", tabindex: "-1" },
    tag,
    span.text ?? "",
  );
  piece.dataset.index = index;
  return piece;
}

function kindLabel(span) {
  return KINDS.find((kind) => kind.name === span.kind).label;
}

function described(span) {
  const facts = [
    `rows ${count(span.start)} to ${count(span.end - 1)}`,
    span.donor && `donor ${span.donor.slice(0, 12)}`,
    span.tier && `from ${span.tier}`,
    span.kind === "moved" &&
      `the text before it resembles the donor's by ${percent(span.resemblance, 1)}`,
    span.recomputed && `${count(span.recomputed)} of ${plural(span.tokens, "row")} computed again`,
  ].filter(Boolean);
  return [
    element("b", {}, kindLabel(span)),
    ` ${plural(span.tokens, "row")}`,
    ...facts.map((fact) => ` · ${fact}`),
  ];
}
