"""The recording endpoint: a server that records the tokens of external agents.

`conversation` maps the messages of a call to recorded tokens. `schemas` and `wire` check and read
requests. `session` holds the calls of one episode, and `agents` turns them into trajectories. The
other files handle HTTP and are the only ones that need starlette and uvicorn: `answers`,
`responses` (OpenAI's Responses API), `messages` (Anthropic's Messages API), `connections` and
`server`.
"""
