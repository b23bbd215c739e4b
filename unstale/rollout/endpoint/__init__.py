"""The recording endpoint: a client of the OpenAI API becomes an agent with recorded tokens.

`conversation` finds the tokens of a call; `schemas` and `wire` check and read requests; `session`
holds the calls of one episode; `agents` makes trajectories of them; `answers` and `server` are
HTTP, the only files that need starlette and uvicorn.
"""
