// Markdown as elements. Everything a model writes becomes text nodes: there is no HTML to escape,
// no image is loaded, and a link leads only to a web page or a mail address, which is shown.

import { copyButton, element, plural } from "./dom.js";

const DEEPEST = 8; // lists and quotes inside one another
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)(?:[-*+]|(\d{1,9})[.)])[ \t]+(.*)$/;
const DASHES = /^:?-+:?$/;
const MOST_MARKDOWN = 50_000; // characters; it is drawn anew with every piece of an answer
const MOST_BLOCKS = 1000;
const MOST_CELLS = 50; // in a row
const MOST_TEXT = 200_000;
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

let left = 0; // how many blocks may still be made

/** The elements of ``text``, which may end anywhere: an open code block reaches to its end. Of a
 * very long text, only the beginning is read as Markdown, and not all is shown. */
export function markdown(text) {
  left = MOST_BLOCKS;
  const found = blocks(text.slice(0, MOST_MARKDOWN).split(/\r?\n/), 0);
  if (text.length > MOST_MARKDOWN) {
    found.push(element("p", {}, text.slice(MOST_MARKDOWN, MOST_TEXT)));
  }
  if (text.length > MOST_TEXT) {
    const more = plural(text.length - MOST_TEXT, "more character");
    found.push(element("p", { class: "waiting" }, `… and ${more}: copy the answer to see them.`));
  }
  return found;
}

function blocks(lines, depth) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (left <= 0) {
      found.push(element("p", {}, lines.slice(at).join("\n")));
      break;
    }
    const [node, next] = lines[at].trim() ? block(lines, at, depth) : [null, at + 1];
    if (node) {
      found.push(node);
      left -= 1;
    }
    at = next;
  }
  return found;
}

/** The block that begins at a line, and the line after it. */
function block(lines, at, depth) {
  const line = lines[at];
  if (FENCE.test(line)) return codeBlock(lines, at);
  if (HEADING.test(line)) {
    const [, marks, title] = line.match(HEADING);
    const level = Math.min(6, marks.length + 3); // the page has the first three
    return [element(`h${level}`, {}, ...inline(title.replace(/[ \t]#+[ \t]*$/, ""))), at + 1];
  }
  if (RULE.test(line)) return [element("hr"), at + 1];
  if (depth < DEEPEST && QUOTE.test(line)) return quote(lines, at, depth);
  if (depth < DEEPEST && ITEM.test(line)) return list(lines, at, depth);
  if (isTable(lines, at)) return table(lines, at);
  return paragraph(lines, at, depth);
}

function codeBlock(lines, at) {
  const [, fence, language] = lines[at].match(FENCE);
  const closing = (line) => {
    const marks = line.trim();
    return marks.length >= fence.length && marks === fence[0].repeat(marks.length);
  };
  let end = at + 1;
  while (end < lines.length && !closing(lines[end])) end += 1;
  const code = lines.slice(at + 1, end).join("\n");
  const head = element(
    "div",
    { class: "code-head" },
    element("span", {}, language || "code"),
    copyButton("Copy", () => code),
  );
  const body = element("pre", { tabindex: "0", "aria-label": "code" }, element("code", {}, code));
  return [element("div", { class: "code" }, head, body), end + 1];
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inside = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [element("blockquote", {}, ...blocks(inside, depth + 1)), end];
}

/** Items of one indentation. What is indented further belongs to the item above it. */
function list(lines, at, depth) {
  const [, indent, number] = lines[at].match(ITEM);
  const items = [];
  let end = at;
  while (end < lines.length && items.length < left) {
    const item = lines[end].match(ITEM);
    const isNext = item && item[1].length <= indent.length && Boolean(item[2]) === Boolean(number);
    if (isNext && !RULE.test(lines[end])) items.push([item[3]]);
    else if (belongs(lines, end, indent.length)) items.at(-1).push(lines[end].trimEnd());
    else break;
    end += 1;
  }
  const nodes = items.map((item) => element("li", {}, ...tight(blocks(dedented(item), depth + 1))));
  return [element(number ? "ol" : "ul", { start: number }, ...nodes), end];
}

function belongs(lines, at, indent) {
  const line = lines[at];
  if (!line.trim()) {
    const after = lines[at + 1] ?? "";
    return indented(after) > indent || ITEM.test(after);
  }
  return (
    indented(line) > indent || (Boolean(lines[at - 1]?.trim()) && !ITEM.test(line) && isText(line))
  );
}

function indented(line) {
  return line.trim() ? line.length - line.trimStart().length : 0;
}

function dedented([first, ...rest]) {
  const depths = rest.filter((line) => line.trim()).map(indented);
  const least = depths.length ? Math.min(...depths) : 0;
  return [first, ...rest.map((line) => line.slice(least))];
}

/** The first paragraph of an item needs no element of its own. */
function tight([first, ...rest]) {
  return first?.tagName === "P" ? [...first.childNodes, ...rest] : first ? [first, ...rest] : [];
}

function isTable(lines, at) {
  const below = lines[at + 1] ?? "";
  if (!lines[at].includes("|") || !below.includes("-") || !below.includes("|")) return false;
  return cells(below).every((cell) => DASHES.test(cell));
}

function table(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|") && left > 0) {
    left -= 1;
    end += 1;
  }
  const row = (line, kind) =>
    element("tr", {}, ...cells(line).map((cell) => element(kind, {}, ...inline(cell))));
  const body = lines.slice(at + 2, end).map((line) => row(line, "td"));
  const drawn = element(
    "table",
    {},
    element("thead", {}, row(lines[at], "th")),
    element("tbody", {}, ...body),
  );
  return [element("div", { class: "wide" }, drawn), end];
}

function cells(line) {
  return line
    .trim()
    .replace(/^\|/, "")
    .replace(/\|$/, "")
    .split("|", MOST_CELLS)
    .map((cell) => cell.trim());
}

function isText(line) {
  return !(FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line));
}

function paragraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && isText(lines[end])) {
    if ((depth < DEEPEST && ITEM.test(lines[end])) || isTable(lines, end)) break;
    end += 1;
  }
  return [element("p", {}, ...inline(lines.slice(at, end).join("\n"))), end];
}

/** Text and elements of a piece of text. */
function inline(text) {
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
