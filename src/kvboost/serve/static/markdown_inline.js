// Markdown inside a line: code, emphasis, links.

import { element } from "./dom.js";

// Every part has a longest length, so that no text takes long to read.
const INLINE = new RegExp(
  [
    "(?<ticks>`{1,4})(?<code>[^`](?:.{0,999}?[^`])?)\\k<ticks>(?!`)",
    "\\*\\*(?=\\S)(?<strong>.{0,499}?\\S)\\*\\*(?!\\*)",
    "(?<!\\w)__(?=\\S)(?<strong2>.{0,499}?\\S)__(?!\\w)",
    "\\*(?=[^\\s*])(?<em>.{0,499}?[^\\s*])\\*(?!\\*)",
    "(?<!\\w)_(?=[^\\s_])(?<em2>.{0,499}?[^\\s_])_(?!\\w)",
    "~~(?=\\S)(?<struck>.{0,499}?\\S)~~",
    "!?\\[(?<label>[^\\[\\]]{1,499})\\]\\((?<to>(?:[^()\\s]|\\([^()\\s]{0,99}\\)){1,999})\\)",
    "(?<bare>https?://[^\\s<>()\\[\\]\"'`*]{1,999})",
    "\\\\(?<escaped>[!-/:-@\\[-`{-~])",
  ].join("|"),
  "gs",
);

/** Text and elements of a piece of text. */
export function inline(text) {
  const found = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index > end) found.push(text.slice(end, match.index));
    found.push(...nodes(match.groups));
    end = match.index + match[0].length;
  }
  if (end < text.length) found.push(text.slice(end));
  return found;
}

function nodes(part) {
  const strong = part.strong ?? part.strong2;
  const em = part.em ?? part.em2;
  if (part.code !== undefined) return [element("code", {}, part.code)];
  if (strong !== undefined) return [element("strong", {}, ...inline(strong))];
  if (em !== undefined) return [element("em", {}, ...inline(em))];
  if (part.struck !== undefined) return [element("s", {}, ...inline(part.struck))];
  if (part.escaped !== undefined) return [part.escaped];
  if (part.bare !== undefined) return bare(part.bare);
  return link(part.to, part.label);
}

/** A full stop after an address is not part of it. */
function bare(address) {
  const [, to, rest] = address.match(/^(.*?)([.,;:!?]*)$/);
  return rest ? [...link(to, to), rest] : link(to, to);
}

/** A label says nothing about where a link leads, so the host follows it. */
function link(to, label) {
  const isLink = /^(https?:\/\/|mailto:)/i.test(to) && URL.canParse(to);
  if (!isLink) return [`${label} (${to})`];
  const { host, pathname } = new URL(to);
  const attributes = { href: to, title: to, target: "_blank", rel: "noopener noreferrer" };
  const node = element("a", attributes, label);
  if (label === to) return [node];
  return [node, element("span", { class: "host" }, ` (${host || pathname})`)];
}
