// From sending a request to its first token: what is known of how far the server is.

import { button, count, duration, element, plural, say } from "./dom.js";

const PERIOD = 500;

/** Shows how much of a prompt has been read, as far as the server says it, and the time. */
export class Reading {
  constructor(requestId, onCancel) {
    this.requestId = requestId;
    this.began = performance.now();
    this.first = null; // when and how far the server first said it was
    this.news = null; // the last it said
    this.at = 0; // when it had read more than before
    this.isQueued = false;
    this.title = element("p", {});
    this.bar = element("progress", { hidden: "", "aria-label": "Tokens of the prompt read" });
    this.facts = element("p", { class: "meta" });
    const cancel = button("Cancel", onCancel);
    this.node = element("div", { class: "reading" }, this.title, this.bar, this.facts, cancel);
    this.timer = setInterval(() => this.draw(), PERIOD);
    this.draw();
  }

  /** ``live`` is the server's last reply to the live view. */
  take({ reading = [], queue }) {
    const found = reading.find((one) => one.request_id === this.requestId);
    this.isQueued = !found && !this.news && queue.waiting > 0 && queue.running > 0;
    if (!found) return;
    const now = performance.now();
    this.first ??= { at: now, read: found.read_tokens };
    if (found.read_tokens !== this.news?.read_tokens) this.at = now; // the last slice ended
    this.news = found;
    this.draw();
  }

  end() {
    clearInterval(this.timer);
  }

  draw() {
    say(this.title, this.titled());
    const { read_tokens: read, prompt_tokens: all } = this.news ?? {};
    this.bar.hidden = !this.isCounted;
    if (this.isCounted) Object.assign(this.bar, { max: all, value: read });
    const known = this.news?.known_tokens;
    const facts = [
      known && `${count(known)} known`,
      `${duration((performance.now() - this.began) / 1000)} so far`,
      this.remaining(),
    ];
    say(this.facts, facts.filter(Boolean).join(" · "));
  }

  /** Whether the server has counted some of the tokens that it reads: it does so after some
   * hundreds, and not at all if some were moved. */
  get isCounted() {
    return Boolean(this.news) && this.news.read_tokens > this.news.known_tokens;
  }

  titled() {
    if (this.isQueued) return "Waiting for other requests";
    if (!this.news) return "Reading the prompt";
    const { read_tokens: read, prompt_tokens: all } = this.news;
    if (this.isCounted) return `Reading the prompt: ${count(read)} of ${plural(all, "token")}`;
    return `Reading the prompt: ${plural(all, "token")}`;
  }

  /** By the pace so far; before there is one, by the server's estimate for a prompt of which it
   * knows nothing. */
  remaining() {
    if (!this.news) return "";
    const { read_tokens: read, prompt_tokens: all, known_tokens: known } = this.news;
    if (read > this.first.read) {
      const each = (this.at - this.first.at) / (read - this.first.read);
      const left = (all - read) * each - (performance.now() - this.at);
      return left > 1000 ? `about ${duration(left / 1000)} to go` : "";
    }
    const estimate = this.news.estimated_ms_without_reuse;
    return estimate && !known ? `about ${duration(estimate / 1000)} in all, by estimate` : "";
  }
}
