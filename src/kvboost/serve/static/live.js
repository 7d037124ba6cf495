// Asks the server for news once a second while the page is visible.

import { ServerError, explained, needKey, sendForJson, setModel } from "./api.js";
import { Cursor, LatencyChart, SourcesChart } from "./charts.js";
import { byId, count, duration, say, setError } from "./dom.js";
import { AuditGauge, FactsPanel, QueueChart, TiersChart } from "./gauges.js";

const PERIOD = 1000;
const SLOWEST = 5000; // between attempts without a reply
const CLOSED = 30_000; // between attempts when the server needs another key
const PATIENCE = 10_000; // for one reply
const MOST_REQUESTS = 200;

/** Returns a function that asks at once. ``onStart`` is called at the first reply of a server, and
 * at the first reply after it was away; ``onNews`` with every reply. */
export function startLive(onStart, onNews) {
  const place = byId("charts");
  const cursor = new Cursor();
  const latency = new LatencyChart(place, cursor);
  const sources = new SourcesChart(place, cursor);
  const tiers = new TiersChart(place);
  const queue = new QueueChart(place);
  const audit = new AuditGauge(place);
  const facts = new FactsPanel(place);

  let requests = [];
  let since = 0;
  let started = null; // when the server started; another time means another server
  let failures = 0;
  let connected = false;
  let asked = false; // to ask again at once, while a reply was awaited
  let resume = null; // ends a pause

  document.addEventListener("visibilitychange", wake);
  loop();
  return wake;

  function wake() {
    if (resume) resume();
    else asked = true;
  }

  async function loop() {
    for (;;) {
      while (document.hidden) {
        show("paused", "paused");
        await pause(null);
      }
      await pause(await once());
    }
  }

  /** Asks; returns how long to wait until the next time. */
  async function once() {
    let live;
    try {
      const signal = AbortSignal.timeout(PATIENCE);
      live = await sendForJson(`kvboost/live?since=${since}`, { signal });
    } catch (error) {
      failures += 1;
      lost(error);
      return wantsKey(error) ? CLOSED : Math.min(failures * PERIOD, SLOWEST);
    }
    failures = 0;
    return take(live) ? PERIOD : 0;
  }

  async function pause(milliseconds) {
    if (!asked) {
      await new Promise((resolve) => {
        const timer = milliseconds === null ? null : setTimeout(resolve, milliseconds);
        resume = () => {
          clearTimeout(timer);
          resolve();
        };
      });
    }
    resume = null;
    asked = false;
  }

  /** False if the page must ask from the beginning, because the server was replaced. */
  function take(live) {
    const start = live.now - live.uptime_s;
    if (live.seq < since || (started !== null && Math.abs(start - started) > 5)) {
      requests = [];
      since = 0;
      started = start;
      if (live.requests.length < live.seq) return false;
    }
    started = start;
    since = live.seq;
    const known = requests.at(-1)?.seq ?? 0;
    const news = live.requests.filter((request) => request.seq > known);
    if (news.length || !requests.length) {
      requests = [...requests, ...news].slice(-MOST_REQUESTS);
      latency.update(requests);
      sources.update(requests);
    }
    tiers.update(live.tiers, live.queue);
    queue.update(live.now, live.queue);
    audit.update(live.healing, live.audit);
    facts.update(live);
    onNews(live);
    describe(live);
    setError("live-error", "");
    show("live", "live");
    if (!connected) {
      connected = true;
      onStart();
    }
    return true;
  }

  function lost(error) {
    connected = false;
    const refused = error instanceof ServerError;
    if (refused) {
      say(byId("live-error"), explained(error));
      byId("live-error").hidden = false;
    }
    show(
      "lost",
      wantsKey(error) ? wanted(error) : refused ? "error" : "server unreachable, trying again",
    );
  }
}

function wantsKey(error) {
  return error instanceof ServerError && (error.status === 401 || error.status === 403);
}

function wanted(error) {
  return error.status === 401 ? "needs a key" : "needs an administrator's key";
}

function show(state, text) {
  byId("connection").dataset.state = state;
  say(byId("connection"), text);
}

function describe(live) {
  setModel(live.model);
  const context = live.context_length ? ` · context ${count(live.context_length)}` : "";
  byId("server").textContent = `${live.model}${context} · up ${duration(live.uptime_s)}`;
  byId("version").textContent = `kvboost ${live.version}`;
  document.title = `KVBoost · ${live.model}`;
  if (live.needs_key) needKey();
}
