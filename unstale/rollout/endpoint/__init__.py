"""The recording endpoint: whoever speaks the OpenAI API is an agent whose every token is known.

`conversation` decides which tokens a call stands for; `wire` reads requests, refuses them and writes answers;
`session` holds the calls of one episode; `agents` makes trajectories of them; `server` is HTTP, the only file that
needs starlette and uvicorn.
"""
