// The form, the streamed answer, and the plan.

import { ServerError, events, explained, modelName, send, sendForJson } from "./api.js";
import { byId, element, milliseconds, plural } from "./dom.js";
import { EXAMPLES, paragraphs, shuffled } from "./examples.js";
import { drawKey, drawReport } from "./report.js";

const fields = ["system", "documents", "question"];

/** ``onAnswer`` is called when a request has ended, with or without success. */
export function startPlayground(onAnswer) {
  const form = byId("ask-form");
  let running = null; // the AbortController of the request in flight
  let next = null; // the next question of the example

  byId("examples").append(
    ...EXAMPLES.map((example) => {
      const button = element("button", { type: "button", class: "quiet" }, example.title);
      button.addEventListener("click", () => {
        fill(example.first);
        offer(null);
        next = example.next;
        byId("ask").focus();
      });
      return button;
    }),
  );
  drawKey(byId("report"));
  byId("documents").addEventListener("input", showShuffle);
  byId("shuffle").addEventListener("click", () =>
    fill({ documents: shuffled(byId("documents").value) }),
  );
  byId("stop").addEventListener("click", () => running?.abort());
  byId("plan").addEventListener("click", () => form.reportValidity() && run(plan));
  byId("next").addEventListener("click", () => {
    fill(next.shuffle ? { documents: shuffled(byId("documents").value) } : next.change);
    if (!next.shuffle) next = null; // there are many orders, but one question
    byId("ask").focus({ preventScroll: true }); // this button is about to disappear
    run(ask);
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    run(ask);
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  showShuffle();

  async function run(task) {
    if (running) return;
    running = new AbortController();
    begin();
    try {
      await task(body(), running.signal);
    } catch (error) {
      byId("report").replaceChildren(); // it belongs to another prompt
      if (running.signal.aborted) byId("answer-meta").textContent = "Stopped.";
      else showError(explained(error));
    } finally {
      running = null;
      end();
      onAnswer();
    }
  }

  async function ask(body, signal) {
    const began = performance.now();
    const answer = byId("answer");
    let seen = null; // when the first piece arrived, by the clock of this page
    let finish = null;
    let usage = null;
    let report = null;
    const request = {
      ...body,
      model: await modelName(),
      max_tokens: Number(byId("max-tokens").value),
      temperature: Number(byId("temperature").value),
      stream: true,
      stream_options: { include_usage: true },
    };
    const response = await send("v1/chat/completions", { body: request, signal });
    for await (const event of events(response)) {
      if (event.error) throw new ServerError(response.status, event.error.message);
      const choice = event.choices?.[0];
      if (choice?.delta?.content) {
        seen ??= performance.now() - began;
        answer.append(choice.delta.content);
        answer.scrollTop = answer.scrollHeight;
      }
      finish = choice?.finish_reason ?? finish;
      usage = event.usage ?? usage;
      report = event.kvboost ?? report;
    }
    if (report) {
      drawReport(byId("report"), report);
      byId("answer-meta").textContent = summary(report, usage, finish, seen);
    }
    offer(next);
  }

  async function plan(body, signal) {
    const request = { ...body, model: await modelName() };
    const report = await sendForJson("kvboost/plan", { body: request, signal });
    drawReport(byId("report"), report, true);
    byId("answer-meta").textContent = "A plan: how this prompt would be served now.";
  }

  function begin() {
    byId("ask-error").hidden = true;
    byId("answer").replaceChildren();
    byId("answer").setAttribute("aria-busy", "true");
    byId("report").classList.add("old");
    byId("answer-meta").textContent = "Reading the prompt";
    offer(null);
    setRunning(true);
    if (byId("answer").getBoundingClientRect().top > innerHeight - 120) {
      byId("result").scrollIntoView({ block: "start" });
    }
  }

  function end() {
    byId("answer").setAttribute("aria-busy", "false");
    byId("report").classList.remove("old");
    setRunning(false);
  }

  /** Not disabled, which would take the focus away; ``run`` starts nothing meanwhile. */
  function setRunning(on) {
    for (const [id, off] of Object.entries({ ask: on, plan: on, stop: !on })) {
      byId(id).setAttribute("aria-disabled", off);
    }
  }

  function offer(step) {
    byId("next").hidden = !step;
    byId("next").textContent = step ? `Next: ${lowered(step.title)}` : "";
  }
}

function fill(values) {
  for (const name of fields) {
    if (values[name] !== undefined) byId(name).value = values[name];
  }
  showShuffle();
}

function showShuffle() {
  byId("shuffle").disabled = paragraphs(byId("documents").value).length < 2;
}

/** The fields that asking and planning share. */
function body() {
  const [system, documents, question] = fields.map((name) => byId(name).value.trim());
  const content = documents ? `${documents}\n\n${question}` : question;
  const messages = [{ role: "user", content }];
  if (system) messages.unshift({ role: "system", content: system });
  const mode = new FormData(byId("ask-form")).get("mode");
  return { messages, kvboost: { mode, explain: true } };
}

function summary(report, usage, finish, seen) {
  const parts = [];
  if (usage) {
    const decode = report.total_ms - report.ttft_ms;
    const pace = usage.completion_tokens > 1 && decode > 0;
    const speed = pace
      ? `, ${((usage.completion_tokens - 1) / (decode / 1000)).toFixed(1)} per second`
      : "";
    parts.push(`${plural(usage.completion_tokens, "token")}${speed}`);
  }
  parts.push({ stop: "complete", length: "cut off at max tokens" }[finish] ?? `ended: ${finish}`);
  parts.push(`whole request ${milliseconds(report.total_ms)}`);
  if (seen !== null) parts.push(`first piece seen here after ${milliseconds(seen)}`);
  return parts.join(" · ");
}

function showError(message) {
  byId("answer-meta").textContent = "";
  byId("ask-error").textContent = message;
  byId("ask-error").hidden = false;
}

function lowered(title) {
  return title[0].toLowerCase() + title.slice(1);
}
