#!/usr/bin/env bash
# openai 6.49.0 (npm): vectors of a server that answers with plain numbers come back as a quarter of
# their length and as zeros, without an error. The client asks for base64 on its own, and reads
# whatever comes as bytes. Each number becomes one byte without its fraction. A vector of 1024
# numbers between -1 and 1 has 256 left, all alike, so every text is equally near. Servers that do
# not know `encoding_format` answer so. With encoding_format: "float", and in openai 3.57.0
# (Python), the same answer is right.
# Seen on 2026-11-30: npm: 256 numbers, 0 not zero; npm with float: 1024 numbers, 1023 not zero;
# Python: 1024 numbers, 1023 not zero
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'openai==3.57.0'
npm install --silent --no-fund --no-audit --prefix "$folder" 'openai@6.49.0' >/dev/null
cat >"$folder/ask.mjs" <<'JS'
import http from "node:http";
import { spawn } from "node:child_process";
import OpenAI from "openai";

const vector = Array.from({ length: 1024 }, (_, place) => 0.5 - place / 1024);
const usage = { prompt_tokens: 1, total_tokens: 1 };
const data = [{ object: "embedding", index: 0, embedding: vector }];
const answer = JSON.stringify({ object: "list", model: "m", data, usage });
const server = http.createServer((request, response) => {
  request.resume().on("end", () => {
    response.setHeader("Content-Type", "application/json");
    response.end(answer);
  });
});
await new Promise((listening) => server.listen(0, "127.0.0.1", listening));
const baseURL = `http://127.0.0.1:${server.address().port}/v1`;
const client = new OpenAI({ baseURL, apiKey: "key", maxRetries: 0 });

async function measure(options) {
  const { data } = await client.embeddings.create({ model: "m", input: "x", ...options });
  const numbers = data[0].embedding;
  return `${numbers.length} numbers, ${numbers.filter((number) => number !== 0).length} not zero`;
}

const plain = await measure({});
const float = await measure({ encoding_format: "float" });
const program = `
import openai
client = openai.OpenAI(base_url="${baseURL}", api_key="key", max_retries=0)
numbers = client.embeddings.create(model="m", input="x").data[0].embedding
print(f"{len(numbers)} numbers, {sum(number != 0 for number in numbers)} not zero")
`;
const child = spawn(process.argv[2], ["-c", program], { stdio: ["ignore", "pipe", "inherit"] });
let python = "";
child.stdout.on("data", (piece) => (python += piece));
await new Promise((ended) => child.on("close", ended));
server.close();
server.closeAllConnections();
console.log(`npm: ${plain}; npm with float: ${float}; Python: ${python.trim()}`);
JS
output=$(node "$folder/ask.mjs" "$folder/venv/bin/python")
echo "$output"
expected="npm: 256 numbers, 0 not zero; npm with float: 1024 numbers, 1023 not zero; Python: "
expected+="1024 numbers, 1023 not zero"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
