// Two tools that a model may call in the chat. They run in this page.

const object = (properties) => ({ type: "object", properties, required: Object.keys(properties) });

export const TOOLS = [
  {
    type: "function",
    function: {
      name: "current_time",
      description: "The date and time now.",
      parameters: object({}),
    },
  },
  {
    type: "function",
    function: {
      name: "calculate",
      description: "Adds, subtracts, multiplies or divides two numbers.",
      parameters: object({
        a: { type: "number" },
        b: { type: "number" },
        operation: { type: "string", enum: ["add", "subtract", "multiply", "divide"] },
      }),
    },
  },
];

const OPERATIONS = {
  add: (a, b) => a + b,
  subtract: (a, b) => a - b,
  multiply: (a, b) => a * b,
  divide: (a, b) => a / b,
};

/** The tool's answer, as text. @returns {string} */
export function runTool({ function: { name, arguments: argumentsText } }) {
  if (name === "current_time") return new Date().toString();
  if (name !== "calculate") return `There is no tool ${name}.`;
  try {
    const { a, b, operation } = JSON.parse(argumentsText);
    return Object.hasOwn(OPERATIONS, operation)
      ? String(OPERATIONS[operation](Number(a), Number(b)))
      : `There is no operation ${operation}.`;
  } catch (error) {
    return `The arguments are not JSON: ${error.message}`;
  }
}
