// The sources of a prompt's rows, in the order in which they are drawn. The names are classes in
// figures.css, which gives each a colour and a pattern.

export const KINDS = [
  {
    name: "exact",
    label: "exact",
    says: "follows the same text as when it was cached; reused as it is",
  },
  {
    name: "approximate",
    label: "approximate",
    says: "this conversation's own past, read on top of moved rows; used as it is",
  },
  {
    name: "moved",
    label: "moved",
    says: "cached at another position; its keys are rotated to this one",
  },
  { name: "recomputed", label: "computed again", says: "moved rows that were computed again" },
  { name: "compute", label: "computed", says: "new to the cache" },
];

/** Rows by kind. Moved rows are split into reused and recomputed, so that no row counts twice. */
export function rowsByKind({ exact, approximate, moved, recomputed, computed }) {
  return {
    exact,
    approximate,
    moved: moved - recomputed,
    recomputed,
    compute: computed,
  };
}

export function total(rows) {
  return Object.values(rows).reduce((sum, number) => sum + number, 0);
}

/** Rows that were not computed. */
export function kept(rows) {
  return rows.exact + rows.approximate + rows.moved;
}
