"""Routes of other programs that are not answered here, and their equals."""

from __future__ import annotations

_LIST = "`fitserve list` and GET /admin/models list the models."
_UNLOAD = "`fitserve unload NAME` and POST /admin/models/NAME/unload unload a model."
_LOAD = "`fitserve start NAME` and POST /admin/models/NAME/start load a model."
_LOG = "`fitserve logs NAME` and GET /admin/models/NAME/logs show the log of an engine."
_MACHINES = "`fitserve cluster status` lists machines, GET /admin/hardware has the GPUs."
_COPIES = "`fitserve show NAME` and GET /admin/models/NAME list the copies of a model."
_KEYS = "`fitserve keys add NAME` makes a key, the page has them under Keys."
_DESCRIPTION = "/admin/docs is a page with each call, /admin/openapi.json the same as a file."
_BASE_URL = "The base URL of a client is http://HOST:PORT/v1."
_PAGE = "The page is at /."
_CHAT = "Clients call /v1/chat/completions."
_NO_IMAGES = "Images are not made here."
_WHOLE_FILES = "Files are uploaded in one request to /v1/files."
_NO_SEARCH = "Files are not searched here. Those of POST /v1/files are inputs of batches."

# Hints by route; a route may also be the first part of a longer one.
_HINTS = {
    # llama-swap
    "/running": "`fitserve ps` and GET /admin/models list the loaded models.",
    "/unload": _UNLOAD,
    "/api/models/unload": _UNLOAD,
    "/logs": _LOG,
    "/upstream": "`fitserve logs NAME` shows the log of an engine; clients call /v1.",
    # GPUStack
    "/v1-openai": _BASE_URL,
    "/v2/models": _LIST,
    "/v1/workers": _MACHINES,
    "/v2/workers": _MACHINES,
    "/v1/gpu-devices": _MACHINES,
    "/v2/gpu-devices": _MACHINES,
    "/v1/model-instances": _COPIES,
    "/v2/model-instances": _COPIES,
    "/v1/users": _KEYS,
    "/v2/users": _KEYS,
    "/v1/api-keys": _KEYS,
    "/v2/api-keys": _KEYS,
    # LM Studio
    "/api/v1/models/load": _LOAD,
    "/api/v1/models/unload": _UNLOAD,
    "/api/v1/models/download": "`fitserve pull MODEL` downloads the weights.",
    "/api/v1/models": "GET /api/v0/models and GET /v1/models list the models.",
    "/api/v1/chat": _CHAT,
    "/api/v0": _BASE_URL,
    # Ollama
    "/api/push": "Models are not published from here.",
    "/api/create": "`fitserve add NAME SOURCE` adds a model.",
    "/api/copy": "`fitserve set NAME --alias OTHER` gives a model a second name.",
    "/api/delete": "`fitserve rm NAME` removes a model.",
    "/api/blobs": "`fitserve add NAME SOURCE` adds a model from a folder or a repository.",
    # vLLM and SGLang
    "/docs": _DESCRIPTION,
    "/redoc": _DESCRIPTION,
    "/openapi.json": _DESCRIPTION,
    "/ping": "GET /health answers while the gateway runs.",
    "/load": "GET /metrics has the load of each engine.",
    "/server_info": "`fitserve show NAME` has the flags of an engine.",
    "/get_server_info": "`fitserve show NAME` has the flags of an engine.",
    "/get_model_info": "GET /v1/models has the facts of each model.",
    "/sleep": _UNLOAD,
    "/wake_up": "The next request loads a model.",
    "/generate": "Clients call /v1/completions.",
    "/invocations": _CHAT,
    "/pooling": "Clients call /v1/embeddings, /classify or /v1/rerank.",
    "/v1/load_lora_adapter": "`fitserve set MODEL --lora NAME=SOURCE` adds an adapter.",
    "/v1/unload_lora_adapter": "`fitserve set MODEL` with the other adapters removes one.",
    # OpenAI
    "/v1/images": _NO_IMAGES,
    "/v1/videos": _NO_IMAGES,
    "/v1/uploads": _WHOLE_FILES,
    "/v1/vector_stores": _NO_SEARCH,
    "/v1/assistants": "Clients call /v1/responses or /v1/chat/completions.",
    "/v1/threads": "Clients call /v1/responses or /v1/chat/completions.",
    "/v1/conversations": "Clients send the earlier messages, or `previous_response_id`.",
    "/v1/fine_tuning": "Models are not trained here. `fitserve set MODEL --lora` serves adapters.",
    "/v1/moderations": "A classifier answers POST /classify.",
    "/v1/realtime": "A stream is a request to /v1/chat/completions with `stream: true`.",
    # pages
    "/dashboard": _PAGE,
    "/ui": _PAGE,
    "/login": _PAGE,
    "/index.html": _PAGE,
}


def foreign_hint(path: str) -> str:
    """The words on the equal of another program's route; "": the route is of no known program."""
    parts = path.rstrip("/").split("/")
    routes = ("/".join(parts[:count]) for count in range(len(parts), 1, -1))
    return next((_HINTS[route] for route in routes if route in _HINTS), "")


def foreign_routes() -> tuple[str, ...]:
    """Each route with a hint."""
    return tuple(_HINTS)
