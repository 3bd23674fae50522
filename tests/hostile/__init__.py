"""Hostile bytes: a corpus of requests that parsers disagree on, a mutator, an engine that logs raw
    bytes, and the laws.

For all bytes of a client:
    * every answer is HTTP, and its status none of 5xx but 502 and 503;
    * the connection ends within 10 s of the client's end of sending;
    * the engine is asked no less often than it is said to have answered, and no more often than a
      strict reader of RFC 9112 finds requests in the client's bytes: never for an ambiguous one,
      never for one that hides in the body of another;
    * every byte that the engine gets is of a request that the gateway wrote: a fixed head, one
      right Content-Length, a whole body.
"""
