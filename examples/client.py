"""Chat with a served model through the OpenAI client.

pip install openai
python examples/client.py MODEL "Why is the sky blue?"
"""

from __future__ import annotations

import os
import sys

from openai import OpenAI


def main() -> None:
    model = sys.argv[1]
    prompt = " ".join(sys.argv[2:]) or "Say hello in one sentence."
    client = OpenAI(
        base_url=os.environ.get("FITSERVE_URL", "http://127.0.0.1:8080") + "/v1",
        api_key=os.environ.get("FITSERVE_KEY", "none"),
    )
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": prompt}], max_tokens=200, stream=True
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            print(chunk.choices[0].delta.content, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
