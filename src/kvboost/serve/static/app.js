// The page at /: wires its three sections and the key together.

import { key, setKey, watch } from "./api.js";
import { startCache } from "./cache.js";
import { clearTab } from "./conversations.js";
import { byId, say } from "./dom.js";
import { startLive } from "./live.js";
import { startPlayground } from "./playground.js";

const refreshCache = startCache();
const playground = startPlayground(() => {
  askNow();
  refreshCache();
});
const askNow = startLive(refreshCache, playground.heal);

watch.addEventListener("key", ({ detail }) => {
  byId("key-form").hidden = false;
  byId("key-drop").hidden = !key();
  say(byId("key-note"), detail || (key() ? "A key is in use, until this tab is closed." : ""));
});

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  use(byId("key").value.trim());
});
byId("key-drop").addEventListener("click", () => use(""));

function use(value) {
  clearTab();
  setKey(value);
  byId("key").value = "";
  byId("key-note").textContent = "";
  byId("ask-error").hidden = true;
  byId("key-drop").hidden = !value;
  playground.reload();
  askNow();
  refreshCache();
}
