"""As much of SGLang as the engine speaks to, on a CPU: its scheduler's rules, and logits that are a function of the tokens."""

from __future__ import annotations

from array import array
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from trimtab.rollout.external.drawing import KeyedSampler
from trimtab.rollout.external.messages import EngineSetup
from trimtab.rollout.external.sglang.rows import draw_batch

VOCABULARY = 40


@dataclass
class SamplingParams:
    max_new_tokens: int
    temperature: float
    stop_token_ids: list[int]
    normalized: bool = False

    def normalize(self, tokenizer: Any) -> None:
        assert tokenizer is None
        self.normalized = True


class Message(SimpleNamespace):
    """Any of io_struct's."""


@dataclass
class Ending:
    type: str
    message: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"type": self.type, "message": self.message}


@dataclass(eq=False)
class Request:
    rid: str
    origin_input_ids: array
    sampling_params: SamplingParams
    output_ids: array = field(default_factory=lambda: array("q"))
    finished_reason: Ending | None = None
    to_finish: Ending | None = None
    inflight_middle_chunks: int = 0
    cached_tokens: int = 0

    def finished(self) -> bool:
        return self.finished_reason is not None

    def update(self) -> None:
        """In SGLang's order: what was aborted, then the limit, and only then the token."""
        if self.to_finish is not None:
            self.finished_reason = self.to_finish
        elif len(self.output_ids) >= self.sampling_params.max_new_tokens:
            self.finished_reason = Ending("length")
        elif self.output_ids[-1] in self.sampling_params.stop_token_ids:
            self.finished_reason = Ending("stop")


class Adapters(NamedTuple):
    lora_id: str
    lora_name: str
    lora_path: str
    pinned: bool


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(VOCABULARY, VOCABULARY), requires_grad=False)

    def load_weights(self, weights: Any) -> None:
        for name, value in weights:
            assert name == "table"
            self.table.data.copy_(value)

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Of the last tokens, the earlier ones weigh less."""
        return sum((self.table[token] / (i + 1) for i, token in enumerate(reversed(tokens))), torch.zeros(VOCABULARY))


class Scheduler:
    """Retracts its youngest request in every fifth step."""

    def __init__(self, setup: EngineSetup) -> None:
        self.setup = setup
        self.model = Model()
        self.drawing = SimpleNamespace(
            keyed=KeyedSampler(setup.max_sequences, setup.longest, torch.device("cpu")), keys={}
        )
        self.tp_worker = SimpleNamespace(model_runner=self)
        self.weight_updater = self
        self.pool_stats_observer = self
        self.max_total_num_tokens = 64 * setup.page_tokens
        self.waiting_queue: list[Request] = []
        self.running: list[Request] = []
        self.cache: set[tuple[int, ...]] = set()
        self.asleep: set[str] = set()
        self.adapters: list[str] = []
        self.with_adapters: list[str | None] = []
        """Of each request in turn."""
        self.log: list[str] = []
        self.turns = 0
        self.most = 10**9
        """New tokens that it lets a sequence have."""

    def handle_generate_request(self, asked: Message) -> None:
        assert asked.sampling_params.normalized and asked.lora_id in [None, *self.adapters]
        asked.sampling_params.max_new_tokens = min(asked.sampling_params.max_new_tokens, self.most)
        self.with_adapters.append(asked.lora_id)
        self.waiting_queue.append(Request(asked.rid, asked.input_ids, asked.sampling_params))

    def turn(self) -> Any:
        assert not self.asleep
        self.turns += 1
        self.running = [request for request in self.running if not request.finished()]
        if self.turns % 5 == 0 and len(self.running) > 1:
            self.waiting_queue.insert(0, self.running.pop())
        while self.waiting_queue and len(self.running) < self.setup.max_sequences:
            request = self.waiting_queue.pop(0)
            prompt = tuple(request.origin_input_ids)
            if not request.output_ids and prompt in self.cache:  # counted once, retracted or not
                request.cached_tokens = len(prompt)
            self.running.append(request)
        if not self.running:
            return None
        rows = [self.model.logits([*request.origin_input_ids, *request.output_ids]) for request in self.running]
        tokens = draw_batch(self.drawing.keyed, torch.stack(rows), self.running, self.drawing.keys)
        for request, token in zip(self.running, tokens.tolist()):
            request.output_ids.append(token)
            request.update()
            self.cache.add(tuple(request.origin_input_ids))
        return SimpleNamespace(reqs=list(self.running))

    def abort_request(self, order: Message) -> None:
        def meant(request: Request) -> bool:
            return getattr(order, "abort_all", False) or request.rid.startswith(order.rid)

        self.waiting_queue = [request for request in self.waiting_queue if not meant(request)]
        for request in filter(meant, self.running):
            request.to_finish = Ending("abort", "Aborted")

    def is_fully_idle(self) -> bool:
        return not self.running and not self.waiting_queue

    def flush_cache(self, empty_cache: bool) -> bool:
        self.cache.clear()
        self.log.append("flush")
        return self.is_fully_idle()

    def get_pool_stats(self) -> Any:
        return SimpleNamespace(get_max_pool_usage=lambda: 0.25)

    def release_memory_occupation(self, order: Message) -> None:
        assert self.is_fully_idle()
        self.asleep |= set(order.tags)
        self.model.table.data.fill_(float("nan"))
        self.log.append("release")

    def resume_memory_occupation(self, order: Message) -> None:
        self.asleep -= set(order.tags)
        self.log.append(f"resume {order.tags[0]}")

    def load_lora_adapter_from_tensors(self, named: Adapters, tensors: dict[str, torch.Tensor], config: Any) -> Any:
        assert tensors
        self.adapters.append(named.lora_id)
        return SimpleNamespace(success=config["r"] <= self.setup.rank, error_message="its rank is too high")

    def unload_lora_adapter(self, named: Adapters) -> Any:
        self.adapters.remove(named.lora_id)
        return SimpleNamespace(success=True)


def modules(kept: list[Scheduler]) -> dict[str, Any]:
    """What an engine imports, by name; the schedulers that were made are kept."""

    def start(setup: EngineSetup) -> Scheduler:
        kept.append(Scheduler(setup))
        return kept[-1]

    orders = (
        "AbortReq",
        "TokenizedGenerateReqInput",
        "ReleaseMemoryOccupationReqInput",
        "ResumeMemoryOccupationReqInput",
    )
    messages = SimpleNamespace(**dict.fromkeys(orders, Message))
    return {
        "sglang": SimpleNamespace(__version__="0.5.17"),
        "sglang.srt": SimpleNamespace(),
        "sglang.srt.lora": SimpleNamespace(),
        "sglang.srt.lora.lora_registry": SimpleNamespace(LoRARef=Adapters),
        "sglang.srt.managers": SimpleNamespace(),
        "sglang.srt.managers.io_struct": messages,
        "sglang.srt.sampling": SimpleNamespace(),
        "sglang.srt.sampling.sampling_params": SimpleNamespace(SamplingParams=SamplingParams),
        "trimtab.rollout.external.sglang.driver": SimpleNamespace(start=start, quiet=nullcontext),
    }
