// The conversation that is shown, and the list of those before it.

import {
  clearConversations,
  loadConversations,
  messagesOf,
  newConversation,
  saveConversations,
  titleOf,
} from "./conversations.js";
import { byId, element } from "./dom.js";
import { TurnView } from "./turns.js";

const AT_END = 48; // pixels; closer than that, the newest text stays in view

export class Chat {
  /** ``hooks``: ``onOpen`` is told of another conversation, ``onResults`` of messages of tools. */
  constructor(report, hooks) {
    this.place = byId("turns");
    this.report = report;
    this.hooks = hooks;
    this.follows = true; // until the reader scrolls up
    this.scrolled = 0;
    this.place.addEventListener("scroll", () => {
      const { scrollHeight, scrollTop, clientHeight } = this.place;
      const isAtEnd = scrollHeight - scrollTop - clientHeight < AT_END;
      this.follows = isAtEnd || (this.follows && scrollTop >= this.scrolled);
      this.scrolled = scrollTop;
    });
    byId("conversations").addEventListener("change", ({ target }) =>
      this.open(this.all[target.selectedIndex]),
    );
    byId("new").addEventListener("click", () => this.start());
    byId("clear").addEventListener("click", () => {
      byId("clear-dialog").returnValue = "";
      byId("clear-dialog").showModal();
    });
    byId("clear-dialog").addEventListener("close", ({ target }) => {
      if (target.returnValue === "clear") this.clear();
    });
    this.reload();
  }

  /** Shows what the browser keeps. */
  reload() {
    this.all = loadConversations();
    for (const turn of this.all.flatMap((one) => one.turns)) {
      // The server says so if it is still healing.
      if (turn.healing?.status === "waiting") turn.healing = null;
    }
    if (this.all.length) this.open(this.all[0]);
    else this.start();
  }

  open(conversation) {
    this.current = conversation;
    this.views = new Map();
    this.place.replaceChildren();
    for (const turn of conversation.turns) this.show(turn);
    this.lastView?.offerResults();
    const last = conversation.turns.findLast((turn) => turn.answer.report);
    if (last) this.report.showTurn(last);
    else this.report.clear();
    this.list();
    this.follow(true);
    this.hooks.onOpen(conversation);
  }

  /** A new conversation, about the same documents. */
  start() {
    this.all = this.all.filter((one) => one.turns.length);
    const conversation = newConversation();
    if (this.current) {
      conversation.system = byId("system").value;
      conversation.documents = byId("documents").value;
      const isSame = conversation.documents.trim() === this.current.documents;
      if (isSame) conversation.salt = this.current.salt;
    }
    this.all.unshift(conversation);
    this.open(conversation);
  }

  clear() {
    clearConversations();
    this.all = [];
    this.start();
  }

  shows(turn) {
    return this.views.has(turn);
  }

  messages(added) {
    return messagesOf(this.current, added);
  }

  add(turn) {
    this.lastView?.removeResults();
    this.current.turns.push(turn);
    const view = this.show(turn);
    this.list();
    this.follow(true);
    this.reach(view.node);
    return view;
  }

  /** Takes back a turn that has no answer. */
  remove(turn) {
    this.views.get(turn).node.remove();
    this.views.delete(turn);
    this.current.turns.pop();
    this.lastView?.offerResults();
    this.list();
  }

  /** The last turn has ended. */
  finish() {
    this.lastView.offerResults();
    const turn = this.current.turns.at(-1);
    if (turn.answer.report) this.report.showTurn(turn);
    this.all = [this.current, ...this.all.filter((one) => one !== this.current)];
    saveConversations(this.all);
    this.list();
    this.follow();
    this.uncover();
  }

  heal(requests) {
    let ended = false;
    for (const turn of this.current.turns) {
      const news = requests.find((one) => one.request_id === turn.answer?.requestId);
      if (!news || JSON.stringify(news) === JSON.stringify(turn.healing)) continue;
      turn.healing = news;
      this.views.get(turn).drawHealing();
      if (this.report.turn === turn) this.report.heal();
      this.follow();
      ended ||= news.status !== "waiting";
    }
    if (ended) saveConversations(this.all);
    this.uncover();
  }

  get lastView() {
    return this.views.get(this.current.turns.at(-1));
  }

  show(turn) {
    const view = new TurnView(turn, {
      onChoose: (chosen) => this.report.showTurn(chosen),
      onResults: this.hooks.onResults,
      onDrawn: () => this.follow(),
      onShown: (part) => this.reach(part),
    });
    this.views.set(turn, view);
    this.place.append(view.node);
    return view;
  }

  /** Scrolls to ``part`` of the last turn, unless the reader looks at something else. */
  reach(part) {
    const { top, bottom } = this.place.getBoundingClientRect();
    const isSeen = top < innerHeight && bottom > 0;
    if (isSeen && this.follows && this.place.contains(part)) {
      part.scrollIntoView({ block: "nearest" });
    }
  }

  /** Moves the buttons of the last turn out from below the question, which covers the lower end of
   * a narrow window. If they are further down, the reader stays where the answer is read. */
  uncover() {
    const actions = this.lastView?.actions;
    if (actions?.getBoundingClientRect().top < innerHeight) this.reach(actions);
  }

  follow(always = false) {
    this.follows ||= always;
    if (this.follows) this.place.scrollTop = this.place.scrollHeight;
  }

  /** Lists the conversations; the list and the log are hidden while there is nothing in them. */
  list() {
    this.place.hidden = !this.current.turns.length;
    byId("chat-head").hidden = !this.all.some((one) => one.turns.length);
    const options = this.all.map((one) =>
      element("option", { selected: one === this.current }, titleOf(one)),
    );
    byId("conversations").replaceChildren(...options);
  }
}
