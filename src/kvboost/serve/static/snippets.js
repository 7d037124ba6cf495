// A request as a command and as a program: exactly the request, whatever its texts contain. The key
// is not written into them. Characters that cannot be seen are escaped, because terminals act on
// some of them.

const UNSEEN = /[^\P{C}\n]|[^\P{Z} ]/gu; // controls, formats and spaces of all kinds
const DEEPEST = 50; // Python reads no more than 100 to 200 brackets inside one another
export const OPENAI_FIELDS = new Set([
  ...["model", "messages", "stream", "stream_options", "max_tokens", "temperature"],
  ...["response_format", "tools", "tool_choice"],
]);

/** For a POSIX shell. ``base`` is the address of the API, such as http://127.0.0.1:8000/v1. The
 * body comes from a here-document, which has no longest length and in which nothing is special. */
export function curl(request, base, needsKey) {
  const lines = [`curl -sN ${quoted(`${base}/chat/completions`)}`];
  lines.push("-H 'content-type: application/json'");
  if (needsKey) lines.push('-H "authorization: Bearer $KVBOOST_KEY"');
  lines.push("--data-binary @- <<'JSON'");
  // An interactive bash looks for its history after "!", also in a here-document.
  const body = JSON.stringify(request, null, 2).replace(UNSEEN, unicode).replaceAll("!", unicode);
  return `${lines.join(" \\\n  ")}\n${body}\nJSON\n`;
}

function quoted(text) {
  return `'${text.replaceAll("'", `'\\''`)}'`;
}

/** As JSON escapes it: by code units. */
function unicode(character) {
  return character
    .split("")
    .map((unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`)
    .join("");
}

/** For OpenAI's client, which takes fields that it does not know as ``extra_body``. */
export function python(request, base, needsKey) {
  const entries = Object.entries(request);
  const known = entries.filter(([name]) => OPENAI_FIELDS.has(name));
  const other = Object.fromEntries(entries.filter(([name]) => !OPENAI_FIELDS.has(name)));
  const options = [...known, ["extra_body", other]];
  const given = options.map(([name, value]) => `    ${name}=${literal(value, 1)},\n`).join("");
  const modules = [needsKey && "os", given.includes("json.loads(") && "json"].filter(Boolean);
  const imports = modules.sort().map((name) => `import ${name}\n`);
  const key = needsKey ? 'os.environ["KVBOOST_KEY"]' : '"none"';
  return `${imports.length ? `${imports.join("")}\n` : ""}from openai import OpenAI

client = OpenAI(base_url=${literal(base, 0)}, api_key=${key})
stream = client.chat.completions.create(
${given})
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
        for call in choice.delta.tool_calls or []:
            print(call.function.name or "", call.function.arguments or "", end="", flush=True)
print()
`;
}

function literal(value, depth) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value === "string") return text(value);
  if (typeof value === "number") return JSON.stringify(value);
  if (depth > DEEPEST) return `json.loads(${text(JSON.stringify(value))})`;
  const isList = Array.isArray(value);
  const parts = isList
    ? value.map((item) => literal(item, depth + 1))
    : Object.entries(value).map(([name, item]) => `${text(name)}: ${literal(item, depth + 1)}`);
  const [open, close] = isList ? "[]" : "{}";
  if (!parts.length) return open + close;
  const line = open + parts.join(", ") + close;
  if (line.length < 80 && !line.includes("\n")) return line;
  const indent = "    ".repeat(depth + 1);
  const lines = parts.map((part) => `${indent}${part},\n`).join("");
  return `${open}\n${lines}${"    ".repeat(depth)}${close}`;
}

/** A string of JSON is one of Python, but for how characters beyond 16 bits are escaped. */
function text(value) {
  return JSON.stringify(value).replace(UNSEEN, (character) => {
    const code = character.codePointAt(0);
    return code > 0xffff ? `\\U${code.toString(16).padStart(8, "0")}` : unicode(character);
  });
}
