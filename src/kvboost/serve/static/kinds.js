// The sources of a prompt's rows, in the order in which they are drawn. The names are classes in
// figures.css, which gives each a colour and a pattern.

export const KINDS = [
  {
    name: "exact",
    label: "exact",
    says: "Known: it follows the same text as when it was first read. Used as it is.",
  },
  {
    name: "approximate",
    label: "approximate",
    says: "Known: earlier turns of this conversation, which were read after moved text.",
  },
  {
    name: "moved",
    label: "moved",
    says: "Known from another place: it was read before, after other text.",
  },
  {
    name: "recomputed",
    label: "computed again",
    says: "Moved text that was computed again, because it depends most on what precedes it.",
  },
  { name: "compute", label: "computed", says: "New: the model had to read it." },
];

export const HEALED = {
  name: "healed",
  label: "healed",
  says: "Was read after moved text. The server has computed it exactly since, while it was idle.",
};

export function kindOf(name) {
  return KINDS.find((kind) => kind.name === name);
}

/** Rows by kind, of the server's report of an answer or a plan. */
export function reportRows(report) {
  return rowsByKind({
    exact: report.exact_tokens,
    approximate: report.approximate_tokens,
    moved: report.moved_tokens,
    recomputed: report.recomputed_tokens ?? 0, // not known in a plan
    computed: report.computed_tokens,
  });
}

/** Rows by kind. Moved rows are split into reused and recomputed, so that no row counts twice. */
export function rowsByKind({ exact, approximate, moved, recomputed, computed }) {
  return { exact, approximate, moved: moved - recomputed, recomputed, compute: computed };
}

export function total(rows) {
  return Object.values(rows).reduce((sum, number) => sum + number, 0);
}

/** Rows that were not computed. */
export function kept(rows) {
  return rows.exact + rows.approximate + rows.moved;
}
