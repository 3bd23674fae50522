// Calls of a model and settings of apps, as text to copy. Pure: names are quoted as each language
// wants it.

/** The request for each task of a model, and where its answer stands. */
const CALLS = {
  generate: {
    path: "/chat/completions",
    fields: { messages: [{ role: "user", content: "Hello" }] },
    answer: "choices[0].message.content",
  },
  embed: { path: "/embeddings", fields: { input: "Hello" }, answer: "data[0].embedding" },
  rerank: {
    path: "/rerank",
    fields: { query: "capital of France", documents: ["Paris", "Lyon"] },
    answer: "results",
  },
  classify: { path: "/classify", fields: { input: "I like it." }, answer: "data" },
};
const SPEECH = "speech.wav";

/**
 * @typedef {{base: string, model: string, key: string, task: string}} Use  base: ends in /v1; key:
 *   a placeholder; task: the plan's
 * @typedef {{title: string, text: string, about?: string}} Snippet
 */

/** @param {Use} use @returns {Snippet[]} */
export function callSnippets(use) {
  if (use.task === "transcribe") return speechSnippets(use);
  const { path, fields, answer } = CALLS[use.task] ?? CALLS.generate;
  const body = json({ model: use.model, ...fields });
  const url = use.base + path;
  return [
    {
      title: "curl",
      text: [
        `curl ${shell(url)}`,
        `-H ${shell(`Authorization: Bearer ${use.key}`)}`,
        "-H 'Content-Type: application/json'",
        `-d ${shell(body)}`,
      ].join(" \\\n  "),
    },
    { title: "Python", text: python(use, url, body), about: "pip install openai" },
    {
      title: "JavaScript",
      text: [
        `const answer = await fetch(${json(url)}, {`,
        '  method: "POST",',
        "  headers: {",
        '    "Content-Type": "application/json",',
        `    Authorization: ${json(`Bearer ${use.key}`)},`,
        "  },",
        `  body: JSON.stringify(${body}),`,
        "});",
        `console.log((await answer.json()).${answer});`,
      ].join("\n"),
    },
  ];
}

function python(use, url, body) {
  const client = [
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${json(use.base)}, api_key=${json(use.key)})`,
  ];
  const model = `    model=${json(use.model)},`;
  if (use.task === "embed")
    return [
      ...client,
      "answer = client.embeddings.create(",
      model,
      '    input="Hello",',
      ")",
      "print(answer.data[0].embedding)",
    ].join("\n");
  if (use.task === "generate")
    return [
      ...client,
      "answer = client.chat.completions.create(",
      model,
      '    messages=[{"role": "user", "content": "Hello"}],',
      ")",
      "print(answer.choices[0].message.content)",
    ].join("\n");
  return [
    "import httpx",
    "",
    "answer = httpx.post(",
    `    ${json(url)},`,
    `    headers={"Authorization": ${json(`Bearer ${use.key}`)}},`,
    `    json=${body},`,
    ")",
    "print(answer.json())",
  ].join("\n");
}

function speechSnippets({ base, model, key }) {
  const url = `${base}/audio/transcriptions`;
  return [
    {
      title: "curl",
      text: [
        `curl ${shell(url)}`,
        `-H ${shell(`Authorization: Bearer ${key}`)}`,
        `-F file=@${SPEECH}`,
        `-F ${shell(`model=${model}`)}`,
      ].join(" \\\n  "),
    },
    {
      title: "Python",
      text: [
        "from openai import OpenAI",
        "",
        `client = OpenAI(base_url=${json(base)}, api_key=${json(key)})`,
        `with open("${SPEECH}", "rb") as file:`,
        `    answer = client.audio.transcriptions.create(model=${json(model)}, file=file)`,
        "print(answer.text)",
      ].join("\n"),
      about: "pip install openai",
    },
    {
      title: "JavaScript",
      text: [
        '// `file`: of an <input type="file">',
        "const form = new FormData();",
        'form.append("file", file);',
        `form.append("model", ${json(model)});`,
        `const headers = { Authorization: ${json(`Bearer ${key}`)} };`,
        `const answer = await fetch(${json(url)}, { method: "POST", headers, body: form });`,
        "console.log((await answer.json()).text);",
      ].join("\n"),
    },
  ];
}

/**
 * Settings of apps that chat, by the names that docs/apps.md has.
 * @param {Use} use
 * @returns {Snippet[]}
 */
export function appSnippets({ base, model, key }) {
  const root = base.replace(/\/v1$/, "");
  return [
    {
      title: "Open WebUI",
      about: "Its environment. Builtin tools need a model that calls tools.",
      text: [
        `OPENAI_API_BASE_URL=${shell(base)}`,
        `OPENAI_API_KEY=${shell(key)}`,
        "ENABLE_OLLAMA_API=False",
      ].join("\n"),
    },
    {
      title: "Continue",
      about: "~/.continue/config.yaml",
      text: [
        "name: local",
        "version: 1.0.0",
        "schema: v1",
        "models:",
        `  - name: ${json(model)}`,
        "    provider: openai",
        `    model: ${json(model)}`,
        `    apiBase: ${json(base)}`,
        `    apiKey: ${json(key)}`,
      ].join("\n"),
    },
    {
      title: "LangChain",
      about: "pip install langchain-openai",
      text: [
        "from langchain_openai import ChatOpenAI",
        "",
        "model = ChatOpenAI(",
        `    model=${json(model)}, base_url=${json(base)}, api_key=${json(key)}`,
        ")",
      ].join("\n"),
    },
    {
      title: "Claude Code",
      about: "Its environment; the model calls tools and has a context of at least 32k.",
      text: [
        `ANTHROPIC_BASE_URL=${shell(root)}`,
        `ANTHROPIC_AUTH_TOKEN=${shell(key)}`,
        `ANTHROPIC_MODEL=${shell(model)}`,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1",
      ].join("\n"),
    },
    {
      title: "LiteLLM in front",
      about: "config.yaml",
      text: [
        "model_list:",
        `  - model_name: ${json(model)}`,
        "    litellm_params:",
        `      model: ${json(`hosted_vllm/${model}`)}`,
        `      api_base: ${json(base)}`,
        `      api_key: ${json(key)}`,
        "router_settings:",
        "  disable_cooldowns: true",
      ].join("\n"),
    },
  ];
}

/** JSON on one line, which Python, JavaScript and YAML read too. */
const json = (value) =>
  JSON.stringify(value, null, 1)
    .replace(/\n\s*/g, " ")
    .replace(/([{[]) | (?=[}\]])/g, "$1");

/** A word of a shell. */
const shell = (words) =>
  /^[\w./:@-]+$/.test(words) ? words : `'${words.replaceAll("'", "'\\''")}'`;
