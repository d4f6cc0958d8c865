// tools.js - two small tools that run in this page, so that a round trip can be seen.

const tool = (name, description, parameter, about) => ({
  type: "function",
  function: {
    name,
    description,
    parameters: {
      type: "object",
      properties: { [parameter]: { type: "string", description: about } },
      required: [parameter],
    },
  },
});

/** As a request lists them. The words are those the shipped model was taught. */
export const TOOLS = [
  tool("calculator", "Evaluate an arithmetic expression.", "expression", "The expression"),
  tool("lookup", "Look up a fact in the notebook.", "query", "What to look up"),
];

const NOTEBOOK = {
  "birthday of Lily": "May 21",
  "favorite color of Lily": "blue",
  "favorite food of Mia": "soup",
  "pet of Tom": "turtle",
  "city of Noah": "Lisbon",
};

/** The value of + - * / and parentheses over numbers; throws on anything else. */
function evaluate(text) {
  const tokens = text.match(/\d+(?:\.\d+)?|\S/g) ?? [];
  if (tokens.length > 200) throw new Error("the expression is too long");
  let at = 0;
  const sum = () => {
    let value = product();
    while (tokens[at] === "+" || tokens[at] === "-") {
      value += tokens[at++] === "+" ? product() : -product();
    }
    return value;
  };
  const product = () => {
    let value = factor();
    while (tokens[at] === "*" || tokens[at] === "/") {
      if (tokens[at++] === "*") value *= factor();
      else value /= factor();
    }
    return value;
  };
  const factor = () => {
    const token = tokens[at++];
    if (token === "-") return -factor();
    if (token === "(") {
      const value = sum();
      if (tokens[at++] !== ")") throw new Error("a parenthesis is missing");
      return value;
    }
    if (!/^\d/.test(token ?? "")) throw new Error(`cannot read ${token ?? "the end"}`);
    return Number(token);
  };
  const value = sum();
  if (at < tokens.length) throw new Error(`cannot read ${tokens[at]}`);
  return value;
}

const RUN = {
  calculator: ({ expression }) => ["result", evaluate(String(expression))],
  lookup: ({ query }) => ["answer", NOTEBOOK[String(query).trim()] ?? "not found"],
};

export const runs = (name) => Object.hasOwn(RUN, name);

/** The JSON text a tool message carries, with the blank after the colon that models were
 * taught. What goes wrong is said in it. */
export function run(name, argumentsText) {
  let said;
  try {
    said = RUN[name](JSON.parse(argumentsText));
  } catch (error) {
    said = ["error", error.message];
  }
  return `{${said.map((part) => JSON.stringify(part)).join(": ")}}`;
}
