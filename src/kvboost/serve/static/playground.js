// The form: its fields, its buttons and its errors.

import { explained, modelName, sendForJson } from "./api.js";
import { Chat } from "./chat.js";
import { button, byId, count, plural, setError } from "./dom.js";
import { DEMONSTRATION, EXAMPLES, paragraphs, shuffled } from "./examples.js";
import { Exchange } from "./exchange.js";
import { FieldError, formatFields, showAtField, startFormats } from "./formats.js";
import { ReportView } from "./report.js";

const FIELDS = ["system", "documents", "question"];

/** ``onSent`` is called when a request has been sent, ``onAnswer`` when it has ended, with or
 * without success. Returns what the page tells the playground: ``take`` a reply of the live view,
 * ``reload`` the conversations, and ``lock`` while a key is missing. */
export function startPlayground({ onSent, onAnswer }) {
  const form = byId("ask-form");
  const report = new ReportView(byId("report"));
  let running = null; // the AbortController of the request in flight
  let next = null; // the next question of an example
  let isLocked = false;
  const chat = new Chat(report, {
    onOpen: ({ system, documents }) => {
      fill({ system, documents });
      next = null;
      offer(null);
    },
    onResults: (results) => run((signal) => ask(results, false, signal)),
  });
  const setDocuments = (documents) => fill({ documents });
  const exchange = new Exchange(chat, { onSent, stop, say, setDocuments });

  startFormats();
  byId("examples").append(
    ...EXAMPLES.map((example) => button(example.title, () => begin(example))),
  );
  byId("documents").addEventListener("input", showDocuments);
  byId("shuffle").addEventListener("click", () => setDocuments(shuffled(byId("documents").value)));
  byId("show").addEventListener("click", () => (isLocked ? byId("key").focus() : run(demonstrate)));
  byId("stop").addEventListener("click", stop);
  byId("plan").addEventListener("click", () => form.reportValidity() && run(plan));
  byId("compare").addEventListener("click", () => form.reportValidity() && askQuestion(true));
  byId("next").addEventListener("click", goOn);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    askQuestion(false);
  });
  form.addEventListener("invalid", ({ target }) => reveal(target), true);
  form.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.isComposing || event.shiftKey) return;
    const asks = event.ctrlKey || event.metaKey || event.target === byId("question");
    if (!asks || !event.target.matches("textarea, input")) return;
    event.preventDefault();
    form.requestSubmit();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") stop();
  });
  return { take, reload, lock };

  function take(live) {
    chat.heal(live.healed_requests);
    exchange.reading?.take(live);
  }

  function reload() {
    stop();
    lock(false);
    chat.reload();
  }

  function lock(on) {
    isLocked = on;
    byId("show-note").hidden = on;
    byId("show-locked").hidden = !on;
  }

  function stop() {
    running?.abort();
  }

  function begin(example) {
    if (running) return;
    chat.start();
    chat.current.salt = "";
    fill(example.first);
    next = example.next;
    byId("ask").focus();
  }

  function goOn() {
    const step = next;
    if (!step.continues) chat.start();
    fill(step.change);
    next = null;
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
    const starter = document.activeElement;
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
      // Stop and Cancel disappear, which would leave a keyboard nowhere.
      const isLost = [document.body, byId("stop")].includes(document.activeElement);
      setRunning(false);
      if (isLost) starter.focus({ preventScroll: true });
      offer(next);
      onAnswer();
    }
  }

  async function ask(added, compare, signal) {
    const request = await formRequest(added, compare);
    const typed = byId("question").value;
    byId("question").value = "";
    try {
      await exchange.ask(added, request, compare, signal);
    } finally {
      if (!chat.current.turns.length || chat.current.turns.at(-1).added !== added) {
        byId("question").value ||= typed;
      }
    }
  }

  async function demonstrate(signal) {
    const { max_tokens } = DEMONSTRATION;
    fill({ system: "" });
    const options = { max_tokens, temperature: 0, kvboost: { mode: "chunk_kv_reuse" } };
    await exchange.demonstrate((added) => makeRequest(added, options), signal);
    next = DEMONSTRATION.next;
  }

  async function plan(signal) {
    const added = [{ role: "user", content: byId("question").value.trim() }];
    const request = await formRequest(added, false);
    report.showPlan(await sendForJson("kvboost/plan", { body: request, signal }));
    say("Nothing was run.");
  }

  /** A request with the settings of the form. A comparison has reuse on one side. */
  function formRequest(added, compare) {
    const chosen = new FormData(form).get("mode");
    return makeRequest(added, {
      max_tokens: Number(byId("max-tokens").value),
      temperature: Number(byId("temperature").value),
      ...formatFields(),
      kvboost: { mode: compare && chosen === "baseline" ? "chunk_kv_reuse" : chosen },
    });
  }

  async function makeRequest(added, { kvboost, ...options }) {
    const conversation = chat.current;
    conversation.system = byId("system").value.trim();
    conversation.documents = byId("documents").value.trim();
    return {
      model: await modelName(),
      messages: chat.messages(added),
      stream: true,
      stream_options: { include_usage: true },
      ...options,
      ...(conversation.salt && { cache_salt: conversation.salt }),
      kvboost: { ...kvboost, explain: true },
    };
  }

  /** Buttons keep the focus, so they are not disabled; ``run`` starts nothing meanwhile. */
  function setRunning(on) {
    for (const id of ["show", "ask", "compare", "plan"])
      byId(id).setAttribute("aria-disabled", on);
    byId("stop").hidden = !on;
    for (const id of ["conversations", "new", "clear"]) byId(id).disabled = on;
  }

  function offer(step) {
    byId("next").hidden = !step || !chat.current.turns.length;
    byId("next").textContent = step ? `Next: ${lowered(step.title)}` : "";
  }
}

function fill(values) {
  for (const name of FIELDS) {
    if (values[name] !== undefined) byId(name).value = values[name];
  }
  showDocuments();
}

/** Says on the closed disclosure what is in it. */
function showDocuments() {
  const { value } = byId("documents");
  const parts = paragraphs(value).length;
  byId("shuffle").disabled = parts < 2;
  byId("more-note").textContent = parts
    ? `${plural(parts, "paragraph")}, ${count(value.length)} characters`
    : "";
}

/** A field that is wrong must be seen. */
function reveal(field) {
  for (let at = field; (at = at.parentElement?.closest("details")); ) at.open = true;
}

function say(text) {
  byId("status").textContent = text;
}

/** An error of a field is shown there as well. */
function showError(error) {
  say("");
  const isOurs = error instanceof FieldError;
  if (!isOurs) showAtField(error);
  const invalid = "The JSON schema or the tools are not valid: see the field.";
  setError("ask-error", isOurs ? invalid : explained(error));
}

function lowered(title) {
  return title[0].toLowerCase() + title.slice(1);
}
