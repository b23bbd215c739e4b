"""The engine `constant`: every reply repeats one token, the number in `engine.args`."""

from unstale.engines.registry import EngineOptions, EngineSpec
from unstale.engines.scripted import ScriptedEngine


def make(options: EngineOptions) -> ScriptedEngine:
    token = int(options.args[0])
    return ScriptedEngine(lambda tokens, params: [token] * params.max_tokens)


SPEC = EngineSpec(make)
