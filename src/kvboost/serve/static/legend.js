// The sources of a prompt's tokens as words, each with its number and an explanation.

import { count, element, percent, say } from "./dom.js";
import { HEALED, KINDS } from "./kinds.js";

const HINT = "Point at a word to see what it means.";

/** Pointing at a word, tapping it or walking to it with the keyboard explains it in a line below;
 * screen readers say the explanation with the word. */
export class Legend {
  /** ``rows`` by kind; only kinds that have some are listed. */
  constructor(rows, all) {
    this.says = element("p", { class: "says", "aria-hidden": "true" }, HINT);
    this.list = element("ul", { class: "legend" });
    for (const kind of KINDS) {
      const number = rows[kind.name];
      if (!number) continue;
      this.add(kind, [
        element("span", { class: "amount" }, count(number)),
        element("span", { class: "share" }, percent(number, all)),
      ]);
    }
    this.nodes = [this.list, this.says];
  }

  /** Some of the prompt was healed: the colour is on the map. */
  heal() {
    if (!this.list.querySelector(".healed")) this.add(HEALED, []);
  }

  add(kind, numbers) {
    const spoken = element("span", { class: "off-screen", id: `says-${kind.name}` }, kind.says);
    const word = element(
      "button",
      { type: "button", class: "term", "aria-describedby": spoken.id },
      element("span", { class: `swatch fill ${kind.name}`, "aria-hidden": "true" }),
      element("b", {}, kind.label),
      ...numbers,
    );
    for (const event of ["pointerenter", "focus", "click"]) {
      word.addEventListener(event, () => say(this.says, kind.says));
    }
    for (const event of ["pointerleave", "blur"]) {
      word.addEventListener(event, () => say(this.says, HINT));
    }
    this.list.append(element("li", {}, word, spoken));
  }
}
