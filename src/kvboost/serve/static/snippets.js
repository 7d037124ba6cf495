// A request as a command and as a program. The key is not written into them.

/** ``base`` is the address of the API, such as http://127.0.0.1:8000/v1. */
export function curl(request, base, needsKey) {
  const lines = [`curl -sN ${quoted(`${base}/chat/completions`)}`];
  lines.push("  -H 'content-type: application/json'");
  if (needsKey) lines.push('  -H "authorization: Bearer $KVBOOST_KEY"');
  lines.push(`  -d ${quoted(JSON.stringify(request, null, 2))}`);
  return `${lines.join(" \\\n")}\n`;
}

/** For a POSIX shell. */
function quoted(text) {
  return `'${text.replaceAll("'", `'\\''`)}'`;
}

/** For OpenAI's client, which takes fields that it does not know as ``extra_body``. */
export function python(request, base, needsKey) {
  const { kvboost, ...known } = request;
  const options = Object.entries({ ...known, extra_body: { kvboost } });
  const given = options.map(([name, value]) => `    ${name}=${literal(value, 1)},\n`).join("");
  const key = needsKey ? 'os.environ["KVBOOST_KEY"]' : '"none"';
  return `${needsKey ? "import os\n\n" : ""}from openai import OpenAI

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

/** Strings of JSON are strings of Python; true, false and null are not. */
function literal(value, depth) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const isList = Array.isArray(value);
  const parts = isList
    ? value.map((item) => literal(item, depth + 1))
    : Object.entries(value).map(
        ([name, item]) => `${JSON.stringify(name)}: ${literal(item, depth + 1)}`,
      );
  const [open, close] = isList ? "[]" : "{}";
  if (!parts.length) return open + close;
  const line = open + parts.join(", ") + close;
  if (line.length < 80 && !line.includes("\n")) return line;
  const indent = "    ".repeat(depth + 1);
  const lines = parts.map((part) => `${indent}${part},\n`).join("");
  return `${open}\n${lines}${"    ".repeat(depth)}${close}`;
}
