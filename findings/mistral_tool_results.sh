#!/usr/bin/env bash
# mistral-common 1.13.1: the text of a tool's result is read as JSON and written anew before it
# enters the prompt of the tokenizers v2 and v3. A version "1.10" reaches the model as the number
# 1.1, a large decimal as another number, 1E400 as Infinity, and of two equal names the first is
# lost. Only a text that is no JSON stays as it was.
# Seen on 2026-11-29: '1.10': 1.1, '9007199254740993.0': 9007199254740992.0, '1E400': Infinity,
# 'v1.10': "v1.10"
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'mistral-common[sentencepiece]==1.13.1' \
    'sentencepiece==0.2.3'
output=$("$folder/venv/bin/python" - <<'PY'
from mistral_common.protocol.instruct.messages import AssistantMessage, ToolMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.tool_calls import FunctionCall, ToolCall
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

tokenizers = MistralTokenizer.v2(), MistralTokenizer.v3()


def shown(content, tokenizer):
    call = ToolCall(id="123456789", function=FunctionCall(name="f", arguments="{}"))
    request = ChatCompletionRequest(
        messages=[
            UserMessage(content="x"),
            AssistantMessage(content=None, tool_calls=[call]),
            ToolMessage(tool_call_id="123456789", name="f", content=content),
        ]
    )
    prompt = tokenizer.encode_chat_completion(request).text.replace("\u2581", " ")
    result = prompt.partition("[TOOL_RESULTS]")[2]
    return result.partition('"content": ')[2].partition("}")[0].partition(',')[0]


def outcome(content):
    one, two = (shown(content, tokenizer) for tokenizer in tokenizers)
    assert one == two, (one, two)
    return f"{content!r}: {one}"


print(", ".join(map(outcome, ("1.10", "9007199254740993.0", "1E400", "v1.10"))))
PY
)
echo "$output"
expected=''\''1.10'\'': 1.1, '\''9007199254740993.0'\'': 9007199254740992.0, '\''1E400'\'':'
expected+=' Infinity, '\''v1.10'\'': "v1.10"'
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
