// What is said about an answer, about what reuse was worth, and about two answers to one question.

import { count, milliseconds, percent, plural } from "./dom.js";
import { kept, reportRows, total } from "./kinds.js";

// Below this share of the prompt, the time says more about the machine than about reuse.
const MEANINGFUL = 0.25;

/** The answers of a turn in the order in which they are shown. ``other`` is the answer without
 * reuse, or the one before the texts were shuffled. */
export function sidesOf({ answer, other, kind, texts }) {
  if (kind === "compared") {
    return [{ title: "With reuse", answer }, { title: "Without reuse", answer: other }];
  }
  if (kind === "shuffled") {
    return [
      { title: "First time", answer: other, texts: texts[0] },
      { title: "Again, in another order", answer, texts: texts[1] },
    ];
  }
  return [{ title: null, answer }];
}

/** The line below an answer. One of two has its time to the first token above it. */
export function summary({ finish, usage, report }, isPair) {
  const parts = [];
  if (usage && report) {
    const decode = report.total_ms - report.ttft_ms;
    const hasPace = usage.completion_tokens > 1 && decode > 0;
    const pace = hasPace
      ? `, ${((usage.completion_tokens - 1) / (decode / 1000)).toFixed(1)} per second`
      : "";
    parts.push(`${plural(usage.completion_tokens, "token")}${pace}`);
  }
  parts.push(ending(finish));
  if (report) {
    if (!isPair) parts.push(`first token ${milliseconds(report.ttft_ms)}`);
    parts.push(`whole request ${milliseconds(report.total_ms)}`);
  }
  return parts.filter(Boolean).join(" · ");
}

const ENDINGS = new Map([
  ["stop", "complete"],
  ["length", "cut off at max tokens"],
  ["tool_calls", "calls tools"],
  ["stopped", "Stopped."],
]);

function ending(finish) {
  return ENDINGS.get(finish) ?? `ended: ${finish}`;
}

/** What reuse was worth, in a sentence or two. ``off`` is the server's report of the same question
 * without it, if there is one. The times are compared only if both are measured, much was reused
 * and neither request had to wait for others. */
export function gain(on, off = null) {
  if (on.mode === "baseline") return "Reuse was off, so the whole prompt was computed.";
  const rows = reportRows(on);
  const [reused, all] = [kept(rows), total(rows)];
  if (!reused) return "Nothing of this prompt was known before.";
  const share = percent(reused, all);
  if (reused < MEANINGFUL * all) {
    return `${share} of the prompt was known, so there was little to gain.`;
  }
  const said = `${share} of the prompt was reused`;
  if (!off) return `${said}.`;
  const [ours, theirs] = [milliseconds(on.ttft_ms), milliseconds(off.ttft_ms)];
  if (waited(on) || waited(off)) {
    return `${said}. Other requests were running, so the times (${ours} and ${theirs}) do not compare.`;
  }
  const times = off.ttft_ms / on.ttft_ms;
  if (times < 1.05) return `${said}, but the first token came no sooner: ${ours}, not ${theirs}.`;
  return `${said}: the first token came ${ratio(times)} × sooner, after ${ours} instead of ${theirs}.`;
}

function ratio(times) {
  return times >= 100 ? count(times) : times.toFixed(1);
}

/** Whether a request spent much of its time in the queue. */
function waited({ queue_ms: queued, ttft_ms: all }) {
  return queued > 100 && queued > all / 10;
}

/** The sentence below a turn with two answers; "" if one of them did not end. */
export function verdict({ answer, other, kind }) {
  if (!other?.report || !answer?.report) return "";
  const sentences = [
    gain(answer.report, other.report),
    difference(said(answer), said(other)),
  ];
  if (kind === "shuffled" && said(answer) !== said(other)) {
    sentences.push("The order of texts can change an answer, and so can moved text.");
  }
  return sentences.join(" ");
}

function said({ content, calls }) {
  return [content, ...calls.flatMap((call) => [call.name, call.arguments])].join(" ").trim();
}

function difference(one, other) {
  if (one === other) return "The answers are the same.";
  const [words, others] = [one.split(/\s+/), other.split(/\s+/)];
  const same = words.findIndex((word, place) => word !== others[place]);
  const common = same < 0 ? words.length : same;
  const share = percent(common, Math.max(words.length, others.length));
  return `The answers differ after ${plural(common, "word")} (${share}).`;
}
