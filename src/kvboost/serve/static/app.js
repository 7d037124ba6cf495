// The page at /: wires its four sections and the key together.

import { key, setKey, watch } from "./api.js";
import { startCache } from "./cache.js";
import { clearTab } from "./conversations.js";
import { byId, say } from "./dom.js";
import { startLive } from "./live.js";
import { startPlayground } from "./playground.js";
import { startRequests } from "./requests.js";

const refreshCache = startCache();
const requests = startRequests();
const playground = startPlayground({
  onSent: () => askNow(),
  onAnswer: () => {
    askNow();
    refreshCache();
    requests.refresh();
  },
});
const askNow = startLive(refreshCache, (live) => {
  playground.take(live);
  requests.take(live);
});

watch.addEventListener("key", ({ detail: { message, status } }) => {
  byId("key-form").hidden = false;
  byId("key-drop").hidden = !key();
  say(byId("key-note"), message || (key() ? "A key is in use, until this tab is closed." : ""));
  playground.lock(!key() || status === 401);
});

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  use(byId("key").value.trim());
});
byId("key-drop").addEventListener("click", () => use(""));

function use(value) {
  if (/[^\x21-\x7e]/.test(value)) {
    say(byId("key-note"), "This is no key: keys have only visible ASCII characters.");
    return;
  }
  clearTab();
  setKey(value);
  byId("key").value = "";
  byId("key-note").textContent = "";
  byId("ask-error").hidden = true;
  byId("key-drop").hidden = !value;
  playground.reload();
  askNow();
  refreshCache();
  requests.clear();
  requests.refresh();
}
