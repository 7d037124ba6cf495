// The model and the machine.

import { Chart } from "./charts.js";
import { bytes, count, element } from "./dom.js";

export class FactsPanel extends Chart {
  constructor(place) {
    super(place, "Model and machine");
    this.shown = "";
  }

  update(live) {
    const lines = described(live);
    const text = JSON.stringify(lines);
    if (text === this.shown) return; // so that a selection in it survives
    this.shown = text;
    const rows = lines.map(([name, value]) =>
      element("div", {}, element("dt", {}, name), element("dd", {}, value)),
    );
    this.body.replaceChildren(element("dl", { class: "facts" }, ...rows));
  }

  draw() {}
}

function described({ model, context_length: context, version, facts, tiers }) {
  const precise =
    facts.kv_cache_bits && facts.kv_cache_bits < 16 ? `, kept in ${facts.kv_cache_bits} bits` : "";
  const rows = {
    Model: [model, facts.architecture, facts.parameters && `${millions(facts.parameters)} parameters`],
    Numbers: [facts.dtype, facts.layers && `${count(facts.layers)} layers`],
    Context: [context ? `${count(context)} tokens` : "no limit"],
    KV: [
      facts.kv_bytes_per_token && `${bytes(facts.kv_bytes_per_token)} per token${precise}`,
      facts.chunk_size && `chunks of ${count(facts.chunk_size)} tokens`,
    ],
    Device: [
      facts.device,
      facts.device_name,
      facts.threads && `${count(facts.threads)} threads`,
      facts.memory_bytes && `${bytes(facts.memory_bytes)} of memory`,
    ],
    Kernels: [facts.kernels],
    Tiers: Object.entries(tiers).map(tierOf),
    Repair: [facts.recompute_strategy, facts.heal && `healing ${facts.heal}`],
    Version: [`kvboost ${version}`],
  };
  return Object.entries(rows)
    .map(([name, values]) => [name, values.filter(Boolean).join(" · ")])
    .filter(([, value]) => value);
}

function tierOf([name, { max_bytes: most, state }]) {
  if (most) return `${name} ${bytes(most)}`;
  return state && name; // without a limit of its own
}

function millions(number) {
  return number >= 1e9 ? `${(number / 1e9).toFixed(1)} billion` : `${count(number / 1e6)} million`;
}
