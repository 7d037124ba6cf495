// Buttons that copy a text.

import { button, element } from "./dom.js";

const SHOWN = 2000; // how long a button says that it has copied

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

/** Without control characters other than tabs and line ends: they cannot be seen, and terminals act
 * on them. */
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
