"""The recording endpoint: an HTTP server that external agents call, and that records all tokens.

`conversation` maps the messages of a call to recorded tokens. `schemas` and `wire` check and read
requests. `session` holds the calls of one episode, and `agents` makes a trajectory of them. The
other files handle HTTP, and only they need starlette and uvicorn: `answers`, `responses` (OpenAI's
Responses API), `messages` (Anthropic's Messages API), `connections` and `server`.
"""
