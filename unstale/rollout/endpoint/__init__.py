"""The recording endpoint: an OpenAI-compatible server that records the tokens of agents.

`conversation` finds the tokens of a call; `schemas` and `wire` check and read requests; `session`
holds the calls of one episode; `agents` makes trajectories of them. `answers`, `responses` (the
Responses API), `connections` and `server` are HTTP, the only files that need starlette and uvicorn.
"""
