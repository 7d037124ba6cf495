// What is said about an answer, and about the same answer with and without reuse.

import { milliseconds, percent, plural, sooner } from "./dom.js";

/** The line below an answer. */
export function summary({ finish, usage, report, seen }) {
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
    parts.push(`first token ${milliseconds(report.ttft_ms)}`);
    if (seen !== null) parts.push(`seen here after ${milliseconds(seen)}`);
    parts.push(`whole request ${milliseconds(report.total_ms)}`);
  }
  return parts.filter(Boolean).join(" · ");
}

const ENDINGS = {
  stop: "complete",
  length: "cut off at max tokens",
  tool_calls: "calls tools",
  stopped: "Stopped.",
};

function ending(finish) {
  return ENDINGS[finish] ?? `ended: ${finish}`;
}

/** ``on`` and ``off`` are answers to the same request, one after the other. */
export function compared(on, off) {
  if (!on.report || !off.report) return "";
  const times = sooner(off.report.ttft_ms / on.report.ttft_ms);
  const server = `${milliseconds(on.report.ttft_ms)} against ${milliseconds(off.report.ttft_ms)}`;
  const here = `${milliseconds(on.seen)} against ${milliseconds(off.seen)}`;
  const { exact_tokens: exact, approximate_tokens: near, moved_tokens: moved } = on.report;
  const first = `First token with reuse: ${times} (server: ${server}; seen here: ${here}).`;
  const cold = exact + near + moved ? "" : " The cache had nothing of this prompt; now it does.";
  return `${first}${cold} ${difference(said(on), said(off))}`;
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
