// Example prompts. Each has a first question and a next one, which shows what was cached.

const PASSAGES = [
  passage(
    "The lighthouse",
    `The lighthouse of Vessby stands on a rock two hundred metres west of the harbour mouth
    and was lit for the first time in the autumn of 1874. Its keeper lived with a family of
    six in the three rooms below the lamp until 1931, when the light was given an electric
    motor and a telephone. The lamp turns once in fifteen seconds and is seen from nineteen
    miles away in clear weather. Fog is announced by a horn that sounds two long notes every
    minute; the fishermen call it the cow. Visitors may climb the 148 steps between May and
    September, on dry days only, because the last flight runs outside around the tower and
    becomes slippery in rain. A ticket costs four crowns and is sold in the small red house
    at the foot of the rock, where coffee is served as well.`,
  ),
  passage(
    "The ferry",
    `The ferry Alma runs between Vessby and the island of Holm, eleven miles to the north.
    She leaves the harbour at seven in the morning, at noon and at six in the evening, and
    the crossing takes fifty minutes when the sea is calm. On Sundays there is no morning
    boat. Alma carries ninety passengers, eight cars and, in a hold with a drain in its
    floor, up to forty sheep, which travel free of charge in the first week of October when
    they are brought down from the summer pastures. Bicycles go on the open deck and must be
    tied with the ropes that hang there. In storms above eight on the scale of Beaufort the
    captain raises a yellow flag on the mast in front of the ticket office: it means that
    the boat stays where she is until the flag comes down again.`,
  ),
  passage(
    "The market hall",
    `The market hall was built of brick and cast iron in 1902, after the wooden stalls on
    the square had burnt for the second time. Thirty-four merchants have a place in it. Fish
    is sold along the northern wall, where the sun never reaches, and from half past five in
    the morning; bread, cheese and vegetables follow at eight. The clock above the main door
    was a present from a shipping company and has always been four minutes fast, so that
    nobody should miss the ferry. Under the floor lies an ice cellar, filled every February
    with blocks sawn out of Lake Orn until the first refrigerator was bought in 1956. Today
    the cellar holds concerts on Thursday evenings in winter, for no more than sixty people,
    who are advised to bring a blanket and to leave their umbrellas upstairs.`,
  ),
  passage(
    "The library",
    `The library of Vessby began as a shelf in the schoolmaster's kitchen and moved into the
    former customs house in 1948. It holds about twenty-one thousand volumes, among them the
    log books of every ship that was registered in the town since 1790, which may be read in
    the reading room with clean hands and a pencil. Books are lent for four weeks, atlases
    for one, and the three telescopes on the second floor for a single night against a
    deposit of fifty crowns. The library is open every afternoon except on Mondays. A bell
    is rung ten minutes before it closes; whoever has not come down by then is let out by
    the porter through the coal door and, by an old custom, has to read a poem aloud at the
    next meeting of the friends of the library.`,
  ),
  passage(
    "The salt works",
    `Salt was made in Vessby from sea water for almost three hundred years. The water was
    led into shallow basins behind the southern dike, thickened by sun and wind from April
    on, and boiled down in iron pans over peat fires in a house without a chimney, whose
    roof of planks let the steam out between them. Ninety buckets of sea water gave about
    one bucket of salt. In its best year, 1811, the works filled six thousand barrels and
    gave bread to every fourth family of the town. Cheap rock salt that came by rail ended
    it in 1869. One pan house has been put together again from old timbers and is fired on
    the first Saturday of each summer month; the salt made there is grey, tastes faintly of
    smoke, and is sold in linen bags of half a pound at the market hall.`,
  ),
];

const TOWN = PASSAGES.join("\n\n");
const HALL = "When was the market hall built?";

/** What "Show me" asks, before and after it shuffles the texts, and the question offered then. */
export const DEMONSTRATION = {
  documents: PASSAGES.slice(0, 4).join("\n\n"),
  question: HALL,
  max_tokens: 32,
  next: {
    title: "Ask something else about the same texts",
    change: { question: "What is the name of the ferry?" },
    continues: true,
  },
};

/** ``next`` fills the form again; it is asked in a new conversation unless it ``continues``. */
export const EXAMPLES = [
  {
    title: "A text, asked twice",
    first: { system: "", documents: TOWN, question: "How many steps does the lighthouse have?" },
    next: {
      title: "Ask something else about the same text",
      change: { question: HALL },
      continues: true,
    },
  },
  {
    title: "After a new system prompt",
    first: {
      system: "You are a guide in the town of Vessby. Answer in one sentence.",
      documents: TOWN,
      question: HALL,
    },
    next: {
      title: "Change the system prompt and ask again",
      change: {
        system:
          "You work at the information desk of a small harbour town. Be friendly and brief, and " +
          "answer only from the texts you are given.",
        question: HALL,
      },
    },
  },
];

/** The paragraphs of ``text`` in another order, one that begins with another of them. */
export function shuffled(text) {
  const parts = paragraphs(text);
  if (parts.length < 2) return text;
  const [first] = parts;
  for (let last = parts.length - 1; last > 0; last -= 1) {
    const other = Math.floor(Math.random() * (last + 1));
    [parts[last], parts[other]] = [parts[other], parts[last]];
  }
  if (parts[0] === first) parts.push(parts.shift());
  return parts.join("\n\n");
}

export function paragraphs(text) {
  return text
    .split(/\n\s*\n/)
    .map((part) => part.trim())
    .filter(Boolean);
}

function passage(title, text) {
  return `${title}\n${text.replace(/\s+/g, " ")}`;
}
