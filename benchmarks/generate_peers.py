"""The engines that `benchmarks.generate` compares, each in a separate process.

A process reads lines of JSON (`{"episodes": [[opening, [[reply length, tool result], ...]], ...],
"live": 64, ...}`). For each it writes a line: seconds, sampled tokens, and one reply with its
context and log-probabilities, which show that all engines compute the same model. Its first line
has the ids of its processes that are not in its process group.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any

Turn = tuple[int, list[int]]
Episode = tuple[list[int], list[Turn]]
Playing = tuple[list[int], list[Turn]]
"""An episode being played: its context so far, and the remaining turns."""
Probe = tuple[list[int], list[int], list[float]]
MAX_CONTEXT = 1024
MAX_LIVE = 256
GROUP = 8
"""Number of episodes with the same prompt."""


SHORT = 16
"""Tokens of the longest reply while a contestant warms up."""


def shortened(episodes: Sequence[Episode]) -> list[Episode]:
    """Return the first two turns of each episode, with replies of at most `SHORT` tokens.

    >>> shortened([([2], [(80, [3]), (5, [4]), (30, [5])])])
    [([2], [(16, [3]), (5, [4])])]
    """
    return [
        (opening, [(min(length, SHORT), result) for length, result in turns[:2]])
        for opening, turns in episodes
    ]


class Ours:
    """The embedded engine as a run uses it, in processes of one thread behind this one."""

    divided = True

    def __init__(self, folder: Path, dtype: Any, threads: int) -> None:
        from unstale.engines.embedded.engine import EmbeddedEngine
        from unstale.engines.pool import EnginePool
        from unstale.engines.registry import EngineOptions

        self._loop = asyncio.new_event_loop()
        processes = threads if self.divided else 1
        slots = -(-(MAX_LIVE + MAX_LIVE // 8) // processes)
        options = EngineOptions(
            folder,
            dtype=dtype,
            threads=threads // processes,
            max_running=slots,
            max_context=MAX_CONTEXT,
        )
        each = [EmbeddedEngine(options) for _ in range(processes)]
        self._engine = EnginePool(each, max_running=slots) if processes > 1 else each[0]
        self._version = -1
        self._loop.run_until_complete(self._engine.start())
        import torch

        from unstale.model.loading import load_model

        # Not the tensors of the file, where the weights of experts have other names.
        self._weights = load_model(folder, torch.float32).state_dict()
        self.pids = [engine.pid for engine in each]

    def forget(self) -> None:
        """Drop caches, by loading the same weights as a new version."""
        self._version += 1
        if self._version:
            self._loop.run_until_complete(self._engine.interrupt())
        self._loop.run_until_complete(self._engine.load(self._weights, self._version))
        self._loop.run_until_complete(self._engine.resume())

    def play(self, episodes: Sequence[Episode], live: int) -> tuple[int, Probe]:
        from unstale.engines import SamplingParams

        waiting = iter(enumerate(episodes))

        async def one_after_another() -> list[Probe]:
            probes = []
            for number, (opening, turns) in waiting:
                context = list(opening)
                for length, result in turns:
                    reply = (
                        await self._engine.sample(context, SamplingParams(length, (), 1.0, number))
                    ).piece
                    probes.append((list(context), list(reply.tokens), list(reply.behavior_logp)))
                    context += [*reply.tokens, *result]
            return probes

        async def all_of_them() -> list[list[Probe]]:
            return await asyncio.gather(*(one_after_another() for _ in range(live)))

        found = self._loop.run_until_complete(all_of_them())
        return sum(len(tokens) for probes in found for _, tokens, _ in probes), found[0][-1]

    def close(self) -> None:
        """End the processes of the engine."""
        self._loop.run_until_complete(self._engine.close())
        self._loop.close()


class OneProcess(Ours):
    """The embedded engine in one process with all threads."""

    divided = False


class Divided:
    """A contestant that divides the episodes among processes of one thread."""

    kind = ""

    def __init__(self, folder: Path, dtype: str, threads: int) -> None:
        command = [
            sys.executable,
            "-m",
            "benchmarks.generate_peers",
            self.kind,
            str(folder),
            dtype,
            "1",
        ]
        how: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        how["env"] = os.environ | {"OMP_NUM_THREADS": "1"}
        self._each = [
            subprocess.Popen(command, **how) for _ in range(threads)
        ]  # of this one's group: stopped with it
        for child in self._each:
            _heard(child)

    def forget(self) -> None:
        """Do nothing: each process drops its caches before it plays."""

    def close(self) -> None:
        """Close the input of the processes, which ends them."""
        for child in self._each:
            child.communicate()

    def choose(self, episodes: Sequence[Episode], live: int) -> None:
        self._played(episodes, live, warm=True)

    def play(self, episodes: Sequence[Episode], live: int) -> tuple[int, Probe]:
        found = self._played(episodes, live, warm=False)
        return sum(one["sampled"] for one in found), found[0]["probe"]

    def _played(self, episodes: Sequence[Episode], live: int, *, warm: bool) -> list[Any]:
        for place, child in enumerate(self._each):
            own = [one for i, one in enumerate(episodes) if i // GROUP % len(self._each) == place]
            assert child.stdin is not None
            _tell(child.stdin, {"episodes": own, "live": live // len(self._each), "warm": warm})
        return [_heard(child) for child in self._each]


def _heard(child: "subprocess.Popen[str]") -> Any:
    assert child.stdout is not None
    if line := child.stdout.readline():
        return json.loads(line)
    raise RuntimeError(f"a process of several ended with {child.wait()}")


class Generate:
    """The `generate` function of transformers.

    In every round each live episode takes a turn, in 1, 2 or 4 batches by reply length; `choose`
    finds the fastest number. A turn is computed from its first token, because the padding of a
    batch would leave holes in a cache of earlier turns.
    """

    def __init__(self, folder: Path, dtype: str, threads: int) -> None:
        self._model = _transformers(folder, dtype, threads)
        self._batches: dict[int, int] = {}

    def forget(self) -> None:
        """Do nothing: there is no cache between plays."""

    def play(self, episodes: Sequence[Episode], live: int) -> tuple[int, Probe]:
        waiting = _begun(episodes)
        playing, sampled, probe = list(islice(waiting, live)), 0, None
        while playing:
            playing.sort(key=lambda episode: episode[1][0][0])
            for batch in _batches(playing, self._batches.get(live, 2)):
                longest = max(turns[0][0] for _, turns in batch)
                tokens, logp = self._batch(
                    [context for context, _ in batch], longest, scored=probe is None
                )
                for row, (context, turns) in enumerate(batch):
                    length, result = turns.pop(0)
                    if probe is None:
                        probe = (
                            list(context),
                            tokens[row][:length],
                            logp(row, tokens[row][:length]),
                        )
                    context += [*tokens[row][:length], *result]
                    sampled += length
            playing = [(context, turns) for context, turns in playing if turns]
            playing += islice(waiting, live - len(playing))
        assert probe is not None
        return sampled, probe

    def choose(self, episodes: Sequence[Episode], live: int) -> None:
        """Measure one turn of `live` episodes with each number of batches; keep the fastest."""
        short = [(opening, turns[:1]) for opening, turns in episodes[:live]]
        self._batch([opening for opening, _ in short], 2, scored=False)
        took = {}
        for number in (1, 2, 4):
            self._batches[live] = number
            start = time.perf_counter()
            self.play(short, live)
            took[number] = time.perf_counter() - start
        self._batches[live] = min(took, key=lambda batches: took[batches])

    def _batch(
        self, contexts: list[list[int]], length: int, *, scored: bool
    ) -> tuple[list[list[int]], Callable[[int, list[int]], list[float]]]:
        import torch

        width = max(map(len, contexts))
        ids = torch.tensor([[0] * (width - len(context)) + context for context in contexts])
        mask = torch.tensor(
            [[0] * (width - len(context)) + [1] * len(context) for context in contexts]
        )
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=length,
                do_sample=True,
                top_k=0,
                pad_token_id=0,
                eos_token_id=None,
                output_logits=scored,
                return_dict_in_generate=True,
            )

        def logp(row: int, tokens: list[int]) -> list[float]:
            found = zip(out.logits[: len(tokens)], tokens, strict=True)
            return [float(logits[row].float().log_softmax(-1)[token]) for logits, token in found]

        return out.sequences[:, width:].tolist(), logp


class _Queue:
    """An engine with continuous batching: requests join and leave its batch at any step."""

    def add(self, number: int, context: list[int], length: int) -> None:
        raise NotImplementedError

    def ended(self) -> list[tuple[int, list[int], list[float]]]:
        raise NotImplementedError

    def forget(self) -> None:
        """Do nothing: there is no cache between plays."""

    def play(self, episodes: Sequence[Episode], live: int) -> tuple[int, Probe]:
        waiting = enumerate(_begun(episodes))
        playing: dict[int, Playing] = {}
        sampled, probe = 0, None

        def begin(count: int) -> None:
            for number, (context, turns) in islice(waiting, count):
                playing[number] = (context, turns)
                self.add(number, context, turns[0][0])

        begin(live)
        while playing:
            for number, tokens, logp in self.ended():
                context, turns = playing[number]
                length, result = turns.pop(0)
                if len(tokens) != length:
                    raise RuntimeError(
                        f"{len(tokens)} tokens sampled where {length} were asked for"
                    )
                probe = (list(context), tokens, logp)
                sampled += length
                context += [*tokens, *result]
                if turns:
                    self.add(number, context, turns[0][0])
                else:
                    del playing[number]
                    begin(1)
        assert probe is not None
        return sampled, probe


class Continuous(_Queue):
    """Continuous batching of transformers, a turn added as soon as it is due."""

    def __init__(self, folder: Path, dtype: str, threads: int) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        model = _transformers(folder, dtype, threads)
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(
                do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                max_memory_percent=0.1, return_logprobs=True
            ),
        )
        self._manager.start()
        self._count = 0

    def add(self, number: int, context: list[int], length: int) -> None:
        self._count += 1
        self._manager.add_request(list(context), f"{number}-{self._count}", max_new_tokens=length)

    def ended(self) -> list[tuple[int, list[int], list[float]]]:
        found = self._manager.get_result(timeout=60)
        if found is None:
            raise RuntimeError("no result within a minute")
        if found.error:
            raise RuntimeError(found.error)
        return [
            (
                int(found.request_id.split("-")[0]),
                list(found.generated_tokens),
                list(found.logprobs),
            )
        ]


class Vllm(_Queue):
    """vLLM's CPU build, in this process, with its prefix cache.

    It takes its threads from the environment.
    """

    eager = False

    def __init__(self, folder: Path, dtype: Any, threads: int) -> None:
        from vllm import EngineArgs, LLMEngine, SamplingParams

        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(folder),
                dtype=dtype,
                skip_tokenizer_init=True,
                max_num_seqs=MAX_LIVE,
                max_model_len=MAX_CONTEXT,
                enable_prefix_caching=True,
                enforce_eager=self.eager,
                generation_config="vllm",
            )
        )
        self._params = SamplingParams
        self._count = 0

    def forget(self) -> None:
        self._engine.reset_prefix_cache()

    def add(self, number: int, context: list[int], length: int) -> None:
        self._count += 1
        params = self._params(
            temperature=1.0, max_tokens=length, ignore_eos=True, logprobs=0, detokenize=False
        )
        self._engine.add_request(
            f"{number}-{self._count}", {"prompt_token_ids": list(context)}, params
        )

    def ended(self) -> list[tuple[int, list[int], list[float]]]:
        found = []
        for output in self._engine.step():
            if output.finished:
                reply = output.outputs[0]
                tokens = list(reply.token_ids)
                logp = [of[token].logprob for of, token in zip(reply.logprobs, tokens, strict=True)]
                found.append((int(output.request_id.split("-")[0]), tokens, logp))
        return found


class Eager(Vllm):
    """vLLM without `torch.compile`."""

    eager = True


class GenerateDivided(Divided):
    kind = "generate"


class VllmDivided(Divided):
    kind = "vllm"


def _begun(episodes: Sequence[Episode]) -> Iterator[Playing]:
    """Return copies of the episodes, which change as they are played."""
    return ((list(opening), list(turns)) for opening, turns in episodes)


def _batches(playing: list[Playing], number: int) -> list[list[Playing]]:
    size = -(-len(playing) // number)
    return [playing[start : start + size] for start in range(0, len(playing), size)]


def _transformers(folder: Path, dtype: str, threads: int) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    torch.set_num_threads(threads)
    logging.set_verbosity_error()
    config = AutoConfig.from_pretrained(folder)
    soft_cap = getattr(config, "attn_logit_softcapping", None)  # which sdpa does not compute
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=getattr(torch, dtype),
        attn_implementation="eager" if soft_cap else "sdpa",
    )
    model.generation_config.eos_token_id = None  # lengths are given
    return model.eval()


KINDS: dict[str, Callable[[Path, str, int], Ours | Divided | Generate | _Queue]] = {
    "ours": Ours,
    "ours-threads": OneProcess,
    "generate": Generate,
    "generate-divided": GenerateDivided,
    "continuous": Continuous,
    "vllm": Vllm,
    "vllm-divided": VllmDivided,
    "eager": Eager,
}


def serve(kind: str, folder: str, dtype: str, threads: int) -> None:
    """Answer requests until the input ends. Output of libraries goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    contestant = KINDS[kind](Path(folder), dtype, threads)
    _tell(out, {"pids": getattr(contestant, "pids", [])})
    for line in sys.stdin:
        asked = json.loads(line)
        contestant.forget()
        episodes, live = asked["episodes"], asked["live"]
        if asked["warm"]:
            if isinstance(contestant, Generate | Divided):
                contestant.choose(episodes, live)
            episodes = shortened(episodes)
        start = time.perf_counter()
        sampled, probe = contestant.play(episodes, live)
        _tell(out, {"seconds": time.perf_counter() - start, "sampled": sampled, "probe": probe})


def _tell(out: IO[str], answer: Any) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()


if __name__ == "__main__":
    kind, folder, dtype, threads = sys.argv[1:5]
    serve(kind, folder, dtype, int(threads))
