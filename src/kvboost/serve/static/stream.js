// One answer, as it is streamed.

import { ServerError, events, randomName, send } from "./api.js";

/** An answer of which nothing has come yet. */
export function emptyAnswer() {
  return {
    content: "",
    reasoning: "",
    calls: [], // of tools: id, name, and arguments as JSON text
    finish: null,
    usage: null,
    report: null, // the server's ``kvboost`` object
    ttft: null, // milliseconds until the first token, by the server's clock
    seen: null, // milliseconds until the first piece was here, by this page's clock
    requestId: randomName("page"),
  };
}

/** Fills ``answer`` with the server's answer to ``request``, which is known to the server as
 * ``answer.requestId``; calls ``onPiece`` after each piece. */
export async function streamInto(answer, request, signal, onPiece) {
  const began = performance.now();
  const { requestId } = answer;
  const response = await send("v1/chat/completions", { body: request, signal, requestId });
  const ttft = response.headers.get("x-kvboost-ttft-ms");
  if (ttft !== null) answer.ttft = Number(ttft);
  for await (const event of events(response)) {
    if (event.error) throw new ServerError(response.status, event.error.message);
    const choice = event.choices?.[0];
    if (choice?.delta && take(answer, choice.delta)) {
      answer.seen ??= performance.now() - began;
      onPiece();
    }
    answer.finish = choice?.finish_reason ?? answer.finish;
    answer.usage = event.usage ?? answer.usage;
    answer.report = event.kvboost ?? answer.report;
  }
}

/** False if the delta adds nothing. */
function take(answer, { content, reasoning_content: reasoning, tool_calls: calls = [] }) {
  answer.content += content ?? "";
  answer.reasoning += reasoning ?? "";
  for (const { index, id, function: said } of calls) {
    const call = (answer.calls[index] ??= { id, name: "", arguments: "" });
    call.name += said?.name ?? "";
    call.arguments += said?.arguments ?? "";
  }
  return Boolean(content || reasoning || calls.length);
}

/** The answer as a message of the conversation; null if there is nothing to repeat. */
export function asMessage({ content, calls }) {
  if (!content && !calls.length) return null;
  if (!calls.length) return { role: "assistant", content };
  return {
    role: "assistant",
    content: content || null,
    tool_calls: calls.map(({ id, name, arguments: given }) => ({
      id,
      type: "function",
      function: { name, arguments: given },
    })),
  };
}
