"""A configuration file of llama-swap."""

from __future__ import annotations

SWAP = """\
healthCheckTimeout: 120
macros:
  server: vllm serve
groups:
  big: {swap: true, members: [qwen]}
models:
  qwen:
    cmd: |
      ${server} Qwen/Qwen3-8B --port ${PORT} \\
      --max-model-len 32K -tp 2 --gpu-memory-utilization 0.9 --enable-prefix-caching
      --served-model-name qwen3 --max-num-seqs=64 --no-such-flag 4
    ttl: 300
    aliases: [gpt-4o-mini]
    env: ["CUDA_VISIBLE_DEVICES=0,1", "HF_TOKEN=hidden-token", "NCCL_DEBUG=INFO"]
    checkEndpoint: /health
  llama:
    cmd: /opt/llama-server -m /models/qwen3-8b-q4_k_m.gguf -c 8192
"""
