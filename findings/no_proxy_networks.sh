#!/usr/bin/env bash
# httpx 0.28.1, requests 2.34.2 and urllib of Python 3.11 beside httpx2 2.16.2: the same NO_PROXY
# means three things. A network such as 10.0.0.0/8 holds in requests and in httpx2. httpx takes it
# for the one host 10.0.0.0, so a request to an engine at 10.1.2.3 goes to the proxy of the company,
# which answers 403 or 503 or keeps the prompt in its log. "*.svc" holds in httpx2 alone, and .svc
# in all. Of 3 entries here, httpx and urllib keep 1, requests 2 and httpx2 all 3. Kubernetes and
# its installers write networks into this variable.
# Seen on 2026-11-30: 10.0.0.0/8: httpx proxy, httpx2 direct, requests direct, urllib.request proxy;
# .svc: httpx direct, httpx2 direct, requests direct, urllib.request direct; *.svc: httpx proxy,
# httpx2 direct, requests proxy, urllib.request proxy
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'httpx==0.28.1' 'httpx2==2.16.2' 'requests==2.34.2'
unset NO_PROXY HTTP_PROXY HTTPS_PROXY ALL_PROXY all_proxy https_proxy
output=$("$folder/venv/bin/python" - <<'PY'
import os
import urllib.request

import httpx
import httpx2
import requests

urls = {"10.1.2.3": "http://10.1.2.3:8000/", "engine.svc": "http://engine.svc:8000/"}
os.environ["http_proxy"] = "http://proxy.example:3128"


def is_direct(library, url):
    if library is requests:
        return not requests.utils.get_environ_proxies(url)
    if library is urllib.request:
        return bool(urllib.request.proxy_bypass(url.split("/")[2]))
    with library.Client() as client:
        return client._transport_for_url(library.URL(url)) is client._transport


lines = []
for excluded in ("10.0.0.0/8", ".svc", "*.svc"):
    os.environ["no_proxy"] = excluded
    (host,) = [host for host in urls if host.startswith("10") == excluded.startswith("10")]
    words = [
        f"{library.__name__} {'direct' if is_direct(library, urls[host]) else 'proxy'}"
        for library in (httpx, httpx2, requests, urllib.request)
    ]
    lines.append(f"{excluded}: {', '.join(words)}")
print("; ".join(lines))
PY
)
echo "$output"
expected="10.0.0.0/8: httpx proxy, httpx2 direct, requests direct, urllib.request proxy; .svc:"
expected+=" httpx direct, httpx2 direct, requests direct, urllib.request direct; *.svc: httpx "
expected+="proxy, httpx2 direct, requests proxy, urllib.request proxy"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
