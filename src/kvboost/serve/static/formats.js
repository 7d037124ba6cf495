// The fields for a JSON schema and for tools.

import { byId } from "./dom.js";
import { isObject } from "./stored.js";

const SCHEMA = schemaOf({
  name: { type: "string", maxLength: 40 },
  year: { type: "integer", minimum: 1000, maximum: 2100 },
});

const WEATHER = {
  name: "weather",
  description: "The weather of the next days in a city.",
  parameters: schemaOf({
    city: { type: "string", maxLength: 30 },
    days: { type: "integer", minimum: 1, maximum: 9 },
  }),
};
const TOOLS = [{ type: "function", function: WEATHER }];

const FIELDS = new Map([
  ["response_format", "schema"],
  ["tools", "tools"],
  ["tool_choice", "tools"],
]);

/** An object that has just these properties. */
function schemaOf(properties) {
  const required = Object.keys(properties);
  return { type: "object", properties, required, additionalProperties: false };
}

/** A field has no valid JSON; what is wrong is written below it. */
export class FieldError extends Error {}

export function startFormats() {
  for (const [name, example] of [["schema", SCHEMA], ["tools", TOOLS]]) {
    byId(`${name}-example`).addEventListener("click", () => {
      byId(name).value = JSON.stringify(example, null, 2);
      complain(name, "");
      byId(name).focus();
      byId(name).setSelectionRange(0, 0);
      byId(name).scrollTop = 0;
    });
    byId(name).addEventListener("change", () => {
      try {
        formatFields();
      } catch (error) {
        if (!(error instanceof FieldError)) throw error;
      }
    });
  }
}

/** The fields of a request. Raises FieldError, after it has shown what is wrong and where. */
export function formatFields() {
  const schema = parsed("schema", isObject, "a schema is an object: {…}");
  const tools = parsed("tools", Array.isArray, "tools are a list: […]");
  const fields = {};
  if (schema !== null) {
    fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  if (tools !== null) {
    fields.tools = tools;
    fields.tool_choice = byId("tool-choice").value;
  }
  return fields;
}

/** Shows an error of the server at the field that it names. True if it is one of these fields. */
export function showAtField(error) {
  const name = FIELDS.get(error.param?.split(/[.[]/)[0]);
  if (!name) return false;
  complain(name, error.message);
  return true;
}

function parsed(name, isRight, wanted) {
  const text = byId(name).value.trim();
  complain(name, "");
  if (!text) return null;
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw complain(name, `Not JSON: ${error.message}`);
  }
  if (!isRight(value)) throw complain(name, `Not right: ${wanted}`);
  return value;
}

function complain(name, message) {
  byId(name).setAttribute("aria-invalid", Boolean(message));
  byId(`${name}-error`).textContent = message;
  if (message) byId("more").open = byId("formats").open = true;
  return new FieldError(message);
}
