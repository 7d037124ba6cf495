// Elements and numbers. All that comes from a server or a user enters the page as text.

const SVG = "http://www.w3.org/2000/svg";
const SHOWN = 2000; // how long a button says that it has copied

/** An element with attributes and children; strings among the children become text. */
export function element(name, attributes = {}, ...children) {
  return complete(document.createElement(name), attributes, children);
}

/** The same for SVG. */
export function svg(name, attributes = {}, ...children) {
  return complete(document.createElementNS(SVG, name), attributes, children);
}

function complete(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

export function button(label, onClick, kind = "quiet") {
  const node = element("button", { type: "button", class: kind }, label);
  node.addEventListener("click", onClick);
  return node;
}

/** A button that copies what ``text()`` returns, and says whether it could. */
export function copyButton(label, text) {
  const node = button(label, async () => {
    const done = await copied(text());
    node.focus();
    node.textContent = done ? "Copied" : "Could not copy";
    setTimeout(() => (node.textContent = label), SHOWN);
  });
  return node;
}

/** Without control characters, which terminals act on, other than tabs and line ends. */
async function copied(given) {
  const text = given.replace(/[^\P{Cc}\t\n]/gu, "");
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copiedFromField(text); // pages over plain HTTP have no clipboard
  }
}

function copiedFromField(text) {
  const field = element("textarea", { class: "off-screen", "aria-hidden": "true" });
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}

/** A part of a bar, as long as its share of it. */
export function filled(kind, share) {
  const node = element("span", { class: `fill ${kind}` });
  node.style.width = `${100 * share}%`;
  return node;
}

export function byId(id) {
  return document.getElementById(id);
}

/** Shows an error in its place; "" hides it. */
export function setError(id, text) {
  byId(id).textContent = text;
  byId(id).hidden = !text;
}

/** The place to which a key leads from ``at``, of those up to ``last``; undefined for other keys.
 * ``down``: the step of the key that leads down. */
export function walked({ key }, at, last, down) {
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: down, ArrowUp: -down }[key];
  if (step) return at < 0 ? last : Math.max(0, Math.min(at + step, last));
  return { Home: 0, End: last }[key];
}

/** Sets the text only if it changes, so that screen readers do not repeat it each second. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 2 });

export function count(number) {
  return whole.format(number);
}

/** "1 chunk", "2 chunks". */
export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

export function milliseconds(value) {
  if (value >= 1000) return `${(value / 1000).toFixed(1)} s`;
  return value >= 10 ? `${count(value)} ms` : `${short.format(value)} ms`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value < 10 && unit > 0 ? value.toFixed(1) : count(value)} ${units[unit]}`;
}

/** "100 %" only for all of it, "0 %" only for nothing. */
export function percent(part, of) {
  if (!of || !part) return "0 %";
  if (part >= of) return "100 %";
  const value = (100 * part) / of;
  if (value < 1) return "< 1 %";
  return value > 99 ? "> 99 %" : `${Math.round(value)} %`;
}

export function duration(seconds) {
  if (seconds < 120) return `${count(Math.floor(seconds))} s`;
  if (seconds < 7200) return `${count(Math.floor(seconds / 60))} min`;
  if (seconds < 172_800) return `${count(Math.floor(seconds / 3600))} h`;
  return `${count(Math.floor(seconds / 86_400))} days`;
}

export function timeOfDay(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleTimeString("en-GB");
}

export function median(values) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}
