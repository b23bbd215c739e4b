"""The service: an implementation of each request, separately for each tenant."""

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from unstale.research.tinker.checkpoints import Checkpoints
from unstale.research.tinker.jobs import Jobs, Result
from unstale.research.tinker.sampler import Sampler
from unstale.research.tinker.trainer import Adapters, Saved, Shape, Trainer, TrainingRun
from unstale.research.tinker.wire import (
    Sampling,
    Training,
    field,
    read_sampling,
    sample_result,
    training_result,
)
from unstale.rollout.endpoint.schemas import Refused
from unstale.rollout.seeds import derive_seed

MAX_RUNS = 32
"""Largest number of training runs of a tenant at the same time."""
MAX_SESSIONS = 1000
IDLE_S = 600.0
"""Seconds without a request or heartbeat after which a session may be ended to make room for a new
one.
"""
ADAM = {
    "learning_rate": 1e-4,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-12,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}
"""The client's default options of AdamW. A `grad_clip_norm` of 0 means no clipping."""
_LEAST = {"eps": 1e-30}
"""Smallest values of AdamW's options; 0 for those not listed. With eps 0, rows without a gradient
would become 0 / 0.
"""
_MOST_RATE = 1e3
_NOTE = "the output layer has no adapter: train_unembed has no effect"

Body = Mapping[str, Any]
Answer = dict[str, Any]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class SamplingSession:
    """The version from which a client samples: its path, or None for the base model."""

    path: str | None


class Tenant:
    """The jobs, sessions and training runs of the owner of one token."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.jobs = Jobs()
        self.seen: dict[str, float] = {}
        """For each session, the time of its last request or heartbeat."""
        self.runs: dict[str, TrainingRun] = {}
        self.samplers: dict[str, SamplingSession] = {}

    def run(self, model_id: str) -> TrainingRun:
        return self._get(self.runs, model_id, "model")

    def sampler(self, sampler_id: str) -> SamplingSession:
        return self._get(self.samplers, sampler_id, "sampling session")

    def touch(self, session_id: str) -> None:
        """Record that a session is in use. Raises `Refused` for an unknown session."""
        self._get(self.seen, session_id, "session")
        self.seen[session_id] = time.monotonic()

    def add_session(self) -> str:
        """Begin a session and return its id.

        Raises `Refused` if there are too many sessions and none is idle.
        """
        if len(self.seen) >= MAX_SESSIONS:
            self._drop_idle()
        if len(self.seen) >= MAX_SESSIONS:
            raise Refused(f"there are {MAX_SESSIONS} sessions: end some", status=429)
        session_id = secrets.token_hex(16)
        self.seen[session_id] = time.monotonic()
        return session_id

    def add_run(self, model_id: str, run: TrainingRun) -> None:
        if len(self.runs) >= MAX_RUNS:
            self._drop_idle()
        if len(self.runs) >= MAX_RUNS:
            raise Refused(f"there are {MAX_RUNS} models: unload one, or end its client")
        self.runs[model_id] = run

    def _drop_idle(self) -> None:
        long_ago = time.monotonic() - IDLE_S
        for each, seen in list(self.seen.items()):  # two threads use it
            if seen < long_ago:
                self.end_session(each)

    def end_session(self, session_id: str) -> None:
        self.seen.pop(session_id, None)
        for held in (self.runs, self.samplers):
            for each in list(held):
                if each.startswith(f"{session_id}:"):
                    held.pop(each, None)

    def _get(self, held: Mapping[str, _T], key: str, kind: str) -> _T:
        if key not in held:
            raise Refused(f"there is no {kind} {key[:200]!r}", status=404, code="not_found")
        return held[key]


class Service:
    """The operations of all tenants on one trainer and one engine.

    Passes of the trainer run one at a time, in the order of their requests.
    """

    def __init__(
        self,
        trainer: Trainer,
        sampler: Sampler,
        checkpoints: Checkpoints,
        thread: ThreadPoolExecutor,
        *,
        facts: Mapping[str, Any],
    ) -> None:
        """Create a service for the base model.

        `facts` are given to clients: name, tokenizer and largest context.
        """
        self._trainer = trainer
        self._sampler = sampler
        self._checkpoints = checkpoints
        self._thread = thread
        self._facts = facts
        self._model = str(facts["model_name"])

    async def capabilities(self, tenant: Tenant, body: Body) -> Answer:
        return {"supported_models": [{**self._facts, "trainable": True, "sampleable": True}]}

    async def create_session(self, tenant: Tenant, body: Body) -> Answer:
        session_id = tenant.add_session()
        return {"type": "create_session", "session_id": session_id, "info_message": _NOTE}

    async def heartbeat(self, tenant: Tenant, body: Body) -> Answer:
        tenant.touch(field(body, "session_id", str))
        return {"type": "session_heartbeat"}

    async def finish_session(self, tenant: Tenant, body: Body) -> Answer:
        tenant.end_session(field(body, "session_id", str))
        return {}

    async def create_model(self, tenant: Tenant, body: Body) -> Answer:
        self._require_base(field(body, "base_model", str))
        optimizer = field(body, "optimizer_config", dict, {}).get("type", "adamw")
        if optimizer != "adamw":
            raise Refused(f"optimizer_config.type must be 'adamw', got {str(optimizer)[:60]!r}")
        lora = field(body, "lora_config", dict)
        rank = field(lora, "rank", int)
        if not 1 <= rank <= self._trainer.max_rank:
            raise Refused(f"lora_config.rank must be 1 to {self._trainer.max_rank}, got {rank}")
        train_mlp = field(lora, "train_mlp", bool, True)
        train_attn = field(lora, "train_attn", bool, True)
        if not (train_mlp or train_attn):
            raise Refused("lora_config must train attention or MLP layers: " + _NOTE)
        seed = field(lora, "seed", int, secrets.randbits(32))
        model_id = self._new_model_id(tenant, body)
        shape = Shape(rank, seed & (1 << 63) - 1, train_mlp, train_attn)

        def create() -> Result:
            tenant.add_run(model_id, self._trainer.create(shape))
            return {"type": "create_model", "model_id": model_id}

        return self._submit(tenant, f"{model_id}:create", create)

    async def get_info(self, tenant: Tenant, body: Body) -> Answer:
        model_id = field(body, "model_id", str)
        run = tenant.run(model_id)
        return {
            "type": "get_info",
            "model_id": model_id,
            "model_name": self._model,
            "model_data": self._facts,
            "is_lora": True,
            "lora_rank": run.shape.rank,
        }

    async def unload_model(self, tenant: Tenant, body: Body) -> Answer:
        model_id = field(body, "model_id", str)

        def unload() -> Result:
            tenant.runs.pop(model_id, None)
            return {"type": "unload_model", "model_id": model_id}

        return self._submit(tenant, f"{model_id}:unload", unload)

    def train(self, tenant: Tenant, request: Training, size: int) -> Answer:
        """Start a forward pass of a run, with gradients unless the request is `forward_only`."""
        run = tenant.run(request.model_id)

        def work() -> Result:
            return training_result(*self._trainer.forward_backward(run, request))

        number = secrets.token_hex(8) if request.seq_id is None else request.seq_id
        name = f"{request.model_id}:{number}"
        return self._submit(tenant, name, work, size)

    async def optim_step(self, tenant: Tenant, body: Body) -> Answer:
        run = tenant.run(field(body, "model_id", str))
        if body.get("optimizer_params"):
            raise Refused("optimizer_params is not supported: send adam_params")
        given = field(body, "adam_params", dict)
        if unknown := given.keys() - ADAM.keys():
            raise Refused(f"adam_params has no option {min(unknown)[:60]!r}")
        options = {name: field(given, name, float, default) for name, default in ADAM.items()}
        for name, value in options.items():
            is_beta = name.startswith("beta")
            most = _MOST_RATE if name == "learning_rate" else math.inf
            if not _LEAST.get(name, 0.0) <= value <= most or (is_beta and value >= 1):
                raise Refused(f"adam_params.{name} is out of range: {value}")

        def step() -> Result:
            return {"metrics": run.step(options)}

        return self._submit(tenant, _request_id(body), step)

    async def save_weights(self, tenant: Tenant, body: Body) -> Answer:
        """Save a run's adapters and AdamW's state under the name `path`, by default the number of
        steps.
        """
        model_id = field(body, "model_id", str)
        run = tenant.run(model_id)
        name = field(body, "path", str, "")

        def save() -> Result:
            path = self._checkpoints.write(
                tenant.name, model_id, "weights", name or f"{run.steps:06d}", run.save(), run.shape
            )
            return {"type": "save_weights", "path": path}

        return self._submit(tenant, _request_id(body), save)

    async def save_weights_for_sampler(self, tenant: Tenant, body: Body) -> Answer:
        """Save a run's adapters under the name `path`, or without a name for a new sampling
        session.
        """
        model_id = field(body, "model_id", str)
        run = tenant.run(model_id)
        name = field(body, "path", str, "")
        if field(body, "kind", str, "snapshot") != "snapshot":
            raise Refused("kind must be 'snapshot': a sampler has one version for good")
        number = 0 if name else field(body, "sampling_session_seq_id", int)

        def save() -> Result:
            saved = Saved(run.adapters(), steps=run.steps)
            if name:
                path = self._checkpoints.write(
                    tenant.name, model_id, "sampler_weights", name, saved, run.shape
                )
                return {"type": "save_weights_for_sampler", "path": path}
            path = self._checkpoints.write_unnamed(tenant.name, model_id, number, saved, run.shape)
            sampler_id = f"{model_id.partition(':')[0]}:sample:{number}"
            tenant.samplers[sampler_id] = SamplingSession(path)
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler_id}

        return self._submit(tenant, _request_id(body), save)

    async def load_weights(self, tenant: Tenant, body: Body) -> Answer:
        """Load a saved version into a training run, or into a new one."""
        path = field(body, "path", str)
        with_optimizer = field(body, "optimizer", bool)
        model_id = field(body, "model_id", str, "")
        is_new = not model_id
        if is_new:
            model_id = self._new_model_id(tenant, body)
            name = f"{model_id}:create"
        else:
            tenant.run(model_id)
            name = _request_id(body)
        facts = self._checkpoints.facts(tenant.name, path)
        if with_optimizer and path.split("/")[3] != "weights":
            raise Refused(f"{path} has no optimizer state: it was saved for sampling")

        def load() -> Result:
            saved, shape = self._checkpoints.read(tenant.name, path)
            run = self._trainer.create(facts.shape) if is_new else tenant.run(model_id)
            run.require_shape(shape, path)
            run.load(saved, with_optimizer=with_optimizer)
            if is_new:
                tenant.add_run(model_id, run)
            return {"type": "load_weights", "path": path}

        return self._submit(tenant, name, load)

    async def weights_info(self, tenant: Tenant, body: Body) -> Answer:
        shape = self._checkpoints.facts(tenant.name, field(body, "tinker_path", str)).shape
        return {
            "base_model": self._model,
            "is_lora": True,
            "lora_rank": shape.rank,
            "train_mlp": shape.train_mlp,
            "train_attn": shape.train_attn,
            "train_unembed": False,
        }

    async def create_sampling_session(self, tenant: Tenant, body: Body) -> Answer:
        session_id = field(body, "session_id", str)
        tenant.touch(session_id)
        path = field(body, "model_path", str, None)
        if path is None:
            self._require_base(field(body, "base_model", str))
        else:
            self._checkpoints.facts(tenant.name, path)
        sampler_id = f"{session_id}:sample:{field(body, 'sampling_session_seq_id', int)}"
        tenant.samplers[sampler_id] = SamplingSession(path)
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    async def get_sampler(self, tenant: Tenant, body: Body) -> Answer:
        sampler_id = field(body, "sampler_id", str)
        path = tenant.sampler(sampler_id).path
        return {"sampler_id": sampler_id, "base_model": self._model, "model_path": path}

    async def sample(self, tenant: Tenant, body: Body) -> Answer:
        """Start to sample replies, and to compute the prompt's log-probabilities if they are
        requested.
        """
        sampler_id = field(body, "sampling_session_id", str)
        session = tenant.sampler(sampler_id)
        request = read_sampling(body)
        self._trainer.require_tokens(request.tokens, "prompt")
        self._trainer.require_length(len(request.tokens) + 1, "prompt and one token more")
        request_id = f"{sampler_id}:{field(body, 'seq_id', int)}"
        tenant.jobs.submit(
            request_id, 0, partial(self._sample, tenant, session, request, request_id)
        )
        ids = [f"{request_id}:{index}" for index in range(request.count)]
        return {"request_id": request_id, "sample_sequence_ids": ids}

    async def cancel(self, tenant: Tenant, body: Body) -> Answer:
        tenant.jobs.cancel(field(body, "request_id", str))
        return {}

    async def _sample(
        self, tenant: Tenant, session: SamplingSession, request: Sampling, request_id: str
    ) -> Result:
        path = session.path

        def read() -> Adapters:
            if path is None:
                return self._trainer.base
            return self._checkpoints.read(tenant.name, path)[0].adapters

        def score() -> list[float]:
            return self._trainer.prompt_logps(read(), request.tokens)

        seed = derive_seed(request_id) if request.seed is None else request.seed
        replies = await self._sampler.sample(
            f"{tenant.name}/{path}",
            partial(asyncio.to_thread, read) if path else None,
            request,
            seed,
        )
        logps = None
        if request.scored is not None:
            logps = await self._in_thread(score)
            skipped = len(logps) - request.scored
            logps[:skipped] = [float("nan")] * skipped
        return sample_result(replies, logps)

    def _submit(
        self, tenant: Tenant, request_id: str, work: Callable[[], Result], size: int = 0
    ) -> Answer:
        """Queue work for the trainer's thread, which does all work in order. Return the request's
        id.
        """
        tenant.jobs.submit(request_id, size, lambda: self._in_thread(work))
        return {"request_id": request_id}

    def _in_thread(self, work: Callable[..., _T], *arguments: Any) -> "asyncio.Future[_T]":
        return asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def _new_model_id(self, tenant: Tenant, body: Body) -> str:
        session_id = field(body, "session_id", str)
        tenant.touch(session_id)
        return f"{session_id}:train:{field(body, 'model_seq_id', int)}"

    def _require_base(self, name: str) -> None:
        if name != self._model:
            raise Refused(
                f"base_model must be {self._model!r}, got {name[:200]!r}", param="base_model"
            )


def _request_id(body: Body) -> str:
    """Return the id of a request. It is the same if the client sends the request again."""
    number = field(body, "seq_id", int, None)
    return f"{field(body, 'model_id', str)}:{number or secrets.token_hex(8)}"
