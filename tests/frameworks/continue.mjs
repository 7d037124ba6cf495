// Uses Continue's client of OpenAI's API, and prints as JSON what it got. Argument: a JSON object
// with the provider's name, the address and the bodies.
import { constructLlmApi } from "@continuedev/openai-adapters";

const { provider, apiBase, chat, completion, embedding, rerank } = JSON.parse(process.argv[2]);
const api = constructLlmApi({ provider, apiBase, apiKey: "none" });
const ranker = constructLlmApi({ provider: "jina", apiBase, apiKey: "none" });
const { signal } = new AbortController();

async function all(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

console.log(
  JSON.stringify({
    models: await api.list(),
    whole: await api.chatCompletionNonStream({ ...chat, stream: false }, signal),
    chunks: await all(api.chatCompletionStream({ ...chat, stream: true }, signal)),
    completion: await all(api.completionStream({ ...completion, stream: true }, signal)),
    embedded: await api.embed(embedding),
    ranked: await ranker.rerank(rerank),
  }),
);
