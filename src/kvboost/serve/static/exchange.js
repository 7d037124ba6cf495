// Exchanges with the server: a question, a comparison, the demonstration.

import { randomName } from "./api.js";
import { newTurn } from "./conversations.js";
import { DEMONSTRATION, paragraphs, shuffled } from "./examples.js";
import { Reading } from "./reading.js";
import { emptyAnswer, streamInto } from "./stream.js";

/** Fills turns of ``chat``. ``hooks``: ``onSent`` is called when a request has been sent, ``stop``
 * cancels it, ``say`` shows what is being done, ``setDocuments`` fills that field. */
export class Exchange {
  constructor(chat, hooks) {
    this.chat = chat;
    this.hooks = hooks;
    this.reading = null; // shows how far the prompt in flight is
  }

  /** ``compare``: asks a second time, without reuse. Returns the turn; null if nothing came. */
  ask(added, request, compare, signal) {
    const turn = newTurn(added, request, compare ? "compared" : "plain");
    return this.answer(turn, signal, async (view) => {
      this.hooks.say(compare ? "1 of 2: with reuse" : "Answering");
      await this.stream(turn, "answer", request, view, signal);
      if (!compare) return;
      this.hooks.say("2 of 2: without reuse");
      const mode = { ...request.kvboost, mode: "baseline" };
      await this.stream(turn, "other", { ...request, kvboost: mode }, view, signal);
    });
  }

  /** Asks about a few texts, shuffles them and asks again. Ends with the second conversation, so
   * that it can go on. ``makeRequest`` makes the request for messages. */
  demonstrate(makeRequest, signal) {
    const { documents, question } = DEMONSTRATION;
    this.chat.start();
    this.chat.current.salt = randomName("show-me"); // so that the texts are new at first
    const added = [{ role: "user", content: question }];
    const turn = newTurn(added, null, "shuffled");
    const askAbout = async (texts, place, view) => {
      this.hooks.setDocuments(texts);
      turn.texts[place === "other" ? 0 : 1] = titles(texts);
      turn.request = await makeRequest(added);
      await this.stream(turn, place, turn.request, view, signal);
    };
    return this.answer(turn, signal, async (view) => {
      this.hooks.say("1 of 2: the model reads four texts");
      await askAbout(documents, "other", view);
      const first = turn.request;
      this.hooks.say("2 of 2: the same question, the texts in another order");
      try {
        await askAbout(shuffled(documents), "answer", view);
      } finally {
        if (isEmpty(turn.answer)) {
          turn.request = first; // the conversation goes on from the first answer
          this.hooks.setDocuments(documents);
        }
      }
    });
  }

  /** Shows ``turn`` while ``work`` fills it. Keeps what has come, also if that fails. */
  async answer(turn, signal, work) {
    const view = this.chat.add(turn);
    try {
      await work(view);
      this.hooks.say("");
      return turn;
    } catch (error) {
      for (const one of [turn.answer, turn.other]) {
        if (one) one.finish ??= signal.aborted ? "stopped" : "the connection broke";
      }
      throw error;
    } finally {
      if (this.chat.shows(turn)) this.close(turn, view); // unless another key came meanwhile
    }
  }

  async stream(turn, place, request, view, signal) {
    const answer = (turn[place] = emptyAnswer());
    const reading = (this.reading = new Reading(answer.requestId, this.hooks.stop));
    view.draw(answer, reading.node);
    this.hooks.onSent();
    try {
      await streamInto(answer, request, signal, () => view.piece());
    } finally {
      reading.end();
      this.reading = null;
    }
    view.draw();
  }

  close(turn, view) {
    if (isEmpty(turn.answer)) [turn.answer, turn.other] = [turn.other, null];
    if (isEmpty(turn.other)) [turn.kind, turn.other] = ["plain", null];
    if (isEmpty(turn.answer)) {
      this.chat.remove(turn);
      return;
    }
    view.draw();
    this.chat.finish();
  }
}

/** The first lines of the texts, in their order. */
function titles(documents) {
  return paragraphs(documents)
    .map((text) => text.split("\n")[0])
    .join(" · ");
}

function isEmpty(answer) {
  return !answer || !(answer.content || answer.reasoning || answer.calls.length);
}
