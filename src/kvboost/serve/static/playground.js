// The form: asking, comparing, planning.

import { explained, modelName, sendForJson } from "./api.js";
import { Chat } from "./chat.js";
import { byId, element } from "./dom.js";
import { EXAMPLES, paragraphs, shuffled } from "./examples.js";
import { FieldError, formatFields, showAtField, startFormats } from "./formats.js";
import { ReportView } from "./report.js";
import { emptyAnswer, streamInto } from "./stream.js";

const FIELDS = ["system", "documents", "question"];

/** ``onAnswer`` is called when a request has ended, with or without success. Returns what the page
 * tells the playground: ``heal`` and ``reload``. */
export function startPlayground(onAnswer) {
  const form = byId("ask-form");
  const report = new ReportView(byId("report"));
  let running = null; // the AbortController of the request in flight
  let next = null; // the next question of the example
  const chat = new Chat(report, {
    onOpen: ({ system, documents }) => {
      fill({ system, documents });
      next = null;
      offer(null);
    },
    onResults: (results) => run((signal) => ask(results, false, signal)),
  });

  startFormats();
  narrow();
  byId("examples").append(
    ...EXAMPLES.map((example) => {
      const button = element("button", { type: "button", class: "quiet" }, example.title);
      button.addEventListener("click", () => begin(example));
      return button;
    }),
  );
  byId("documents").addEventListener("input", showShuffle);
  byId("shuffle").addEventListener("click", () =>
    fill({ documents: shuffled(byId("documents").value) }),
  );
  byId("stop").addEventListener("click", () => running?.abort());
  byId("plan").addEventListener("click", () => form.reportValidity() && run(plan));
  byId("compare").addEventListener("click", () => form.reportValidity() && askQuestion(true));
  byId("next").addEventListener("click", goOn);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    askQuestion(false);
  });
  form.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.isComposing || event.shiftKey) return;
    const asks = event.ctrlKey || event.metaKey || event.target === byId("question");
    if (!asks || !event.target.matches("textarea, input")) return;
    event.preventDefault();
    form.requestSubmit();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  showShuffle();
  return { heal: (requests) => chat.heal(requests), reload };

  function reload() {
    running?.abort();
    chat.reload();
  }

  function begin(example) {
    if (running) return;
    chat.start();
    fill(example.first);
    next = example.next;
    byId("ask").focus();
  }

  function goOn() {
    const step = next;
    if (!step.continues) chat.start();
    fill(step.change);
    if (step.shuffle) fill({ documents: shuffled(byId("documents").value) });
    next = step.shuffle ? step : null; // there are many orders, but one question
    byId("ask").focus({ preventScroll: true }); // this button is about to disappear
    askQuestion(false);
  }

  function askQuestion(compare) {
    const added = [{ role: "user", content: byId("question").value.trim() }];
    run((signal) => ask(added, compare, signal));
  }

  async function run(task) {
    if (running) return;
    running = new AbortController();
    byId("ask-error").hidden = true;
    byId("report").classList.add("old");
    offer(null);
    setRunning(true);
    say("");
    try {
      await task(running.signal);
    } catch (error) {
      if (running.signal.aborted) say("Stopped.");
      else showError(error);
    } finally {
      running = null;
      byId("report").classList.remove("old");
      setRunning(false);
      onAnswer();
    }
  }

  async function ask(added, compare, signal) {
    const request = await makeRequest(added, compare);
    const turn = { added, request, answer: emptyAnswer(), off: null, healing: null };
    const view = chat.add(turn);
    const typed = byId("question").value;
    byId("question").value = "";
    say("Reading the prompt");
    try {
      await stream(turn.answer, request, view, signal);
      if (compare) {
        turn.off = emptyAnswer();
        say("The same without reuse");
        const mode = { ...request.kvboost, mode: "baseline" };
        await stream(turn.off, { ...request, kvboost: mode }, view, signal);
      }
      say("");
    } catch (error) {
      const failed = turn.off ?? turn.answer;
      failed.finish ??= signal.aborted ? "stopped" : "the connection broke";
      throw error;
    } finally {
      if (chat.shows(turn)) close(turn, view, typed); // unless another key came meanwhile
    }
  }

  function close(turn, view, typed) {
    if (isEmpty(turn.answer)) {
      chat.remove(turn);
      byId("question").value ||= typed;
      return;
    }
    view.draw();
    chat.finish();
    if (turn.answer.report) report.showTurn(turn);
    offer(next);
  }

  async function stream(answer, request, view, signal) {
    view.draw(answer);
    await streamInto(answer, request, signal, () => view.piece());
    view.draw();
  }

  async function plan(signal) {
    const added = [{ role: "user", content: byId("question").value.trim() }];
    const request = await makeRequest(added, false);
    report.showPlan(await sendForJson("kvboost/plan", { body: request, signal }));
    say("A plan: how this prompt would be served now.");
  }

  /** Comparing without reuse on both sides would compare nothing. */
  async function makeRequest(added, compare) {
    const formats = formatFields();
    chat.current.system = byId("system").value.trim();
    chat.current.documents = byId("documents").value.trim();
    const chosen = new FormData(form).get("mode");
    const mode = compare && chosen === "baseline" ? "chunk_kv_reuse" : chosen;
    return {
      model: await modelName(),
      messages: chat.messages(added),
      max_tokens: Number(byId("max-tokens").value),
      temperature: Number(byId("temperature").value),
      stream: true,
      stream_options: { include_usage: true },
      ...formats,
      kvboost: { mode, explain: true },
    };
  }

  /** Most buttons are not disabled, which would take the focus away; ``run`` starts nothing
   * meanwhile. */
  function setRunning(on) {
    for (const id of ["ask", "compare", "plan"]) byId(id).setAttribute("aria-disabled", on);
    byId("stop").setAttribute("aria-disabled", !on);
    for (const id of ["conversations", "new", "clear"]) byId(id).disabled = on;
  }

  function offer(step) {
    byId("next").hidden = !step;
    byId("next").textContent = step ? `Next: ${lowered(step.title)}` : "";
  }
}

function fill(values) {
  for (const name of FIELDS) {
    if (values[name] !== undefined) byId(name).value = values[name];
  }
  showShuffle();
}

function showShuffle() {
  byId("shuffle").disabled = paragraphs(byId("documents").value).length < 2;
}

/** On a phone the conversation comes first: what is before it is closed. */
function narrow() {
  if (!matchMedia("(max-width: 640px)").matches) return;
  for (const part of document.querySelectorAll(".context details")) part.open = false;
}

function isEmpty({ content, reasoning, calls }) {
  return !content && !reasoning && !calls.length;
}

function say(text) {
  byId("status").textContent = text;
}

/** An error of a field is shown there as well. */
function showError(error) {
  say("");
  const isOurs = error instanceof FieldError;
  if (!isOurs) showAtField(error);
  byId("ask-error").textContent = isOurs
    ? "The JSON schema or the tools are not valid: see the field."
    : explained(error);
  byId("ask-error").hidden = false;
}

function lowered(title) {
  return title[0].toLowerCase() + title.slice(1);
}
