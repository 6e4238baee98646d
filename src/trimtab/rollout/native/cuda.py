"""Decoding on a CUDA device: whole steps as graphs, from the last token of every sequence to the next one and its log-prob.

A step reads which rows it serves from a buffer on the device, so a graph serves any set of sequences up to its size. Entries
beyond the sequences point at a row that is always done. Leaving out sequences that ended is writing that buffer anew: no state
moves. Sequences that end in the middle of a round are done on the device at once: their rows are no longer advanced, read
or written.

Everything a graph touches is at fixed addresses: the arena (keys and values, intermediates, logits), the rows, the weights.
The arena can be lent and taken back; graphs stay valid.

Layers run fused where the architecture is known and the fused step agrees with the model's own forward; otherwise the model's
own modules run inside the graph; where these wait for the host, without graphs. `description` says which, and why.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any, cast

import torch

from trimtab.base.errors import first_line
from trimtab.config.learn import Sampling
from trimtab.model.attention import Rules
from trimtab.model.head import Head
from trimtab.model.memory import device_room
from trimtab.model.packed import PackedPlan
from trimtab.model.parts import Unfusable, Watch
from trimtab.model.policy import TOLERANCE_NATS, Policy
from trimtab.model.recurrent import Mixer
from trimtab.model.shapes import LayerShape
from trimtab.rollout.native.arena import Arena, piece_bytes
from trimtab.rollout.native.cache import Carried, Empty, KVCache, PrefillPlan, PrefillSegment
from trimtab.rollout.native.fused import FusedBody, Workspace
from trimtab.rollout.native.kernels.attention import (
    DecodeBatch,
    DecodeShape,
    Partials,
    decode_attention,
    samples_per_item,
)  # fmt: skip
from trimtab.rollout.native.kernels.latent import latent_attention
from trimtab.rollout.native.kernels.sampling import Draw
from trimtab.rollout.native.kv_codes import Stored, stored_bytes
from trimtab.rollout.native.rows import Rows
from trimtab.rollout.native.scheduler import Sequence
from trimtab.rollout.native.together import Together

MIN_SAVED_BYTES_TO_SHARE = 128 * 2**20
"""What shared-prefix decoding must save a layer from reading to pay for its extra launch. Below that, the samples of a prompt,
which lie side by side, find most of its pages in the L2 cache (docs/log.md)."""
REPLAYS_TIMED = 5
"""Replays of a graph that are timed together."""


def buckets(most: int) -> list[int]:
    """Batch sizes that graphs are made for: fine where a step's time depends on the size, coarse where it hardly does."""
    steps = [*range(1, 3), 4, *range(8, 64, 8), *range(64, 1024, 32)]
    sizes = [b for b in [*steps, *range(1024, max(most, 1024) + 1, 128)] if b < most]
    return [*sizes, most]


@dataclass
class _Layout:
    """What lives in the arena."""

    cache: KVCache
    space: Workspace | None
    partials: Partials
    logits: torch.Tensor


@dataclass(frozen=True)
class _ModulesPlan:
    """The model's own modules, with attention over the pages."""

    batch: DecodeBatch
    cache: KVCache
    partials: Partials

    @property
    def latents(self) -> bool:
        return bool(self.cache.latents)

    def attend(
        self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, rules: Rules
    ) -> torch.Tensor:
        shape = DecodeShape(q_THD.shape[1], k_TKD.shape[1], k_TKD.shape[2], v_TKD.shape[2])
        out = q_THD.new_empty((q_THD.shape[0], shape.heads, shape.value_size))
        keys, values, powers = self.cache.keys[layer], self.cache.values[layer], self.cache.powers(layer)
        if layer in self.cache.latents:
            latent_attention(self.batch, rules, self.partials, q_THD, k_TKD, keys, out)
            return out
        decode_attention(self.batch, shape, rules, self.partials, q_THD, k_TKD, v_TKD, keys, values, out, powers=powers)
        return out

    def recur(self, mixer: Mixer, x_TE: torch.Tensor) -> torch.Tensor:
        assert self.cache.states is not None
        return self.cache.states.step(mixer, x_TE, self.batch.index_B)


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that graphs are captured on, one for all engines: cuBLAS keeps 32 MiB for every stream it has ever worked on."""
    return torch.cuda.Stream(device)


class CudaDecoder:
    """Owns the device memory of the engine and the graphs over it."""

    most_steps = 16
    rounds_ahead = 1

    def __init__(
        self, policy: Policy, shapes: dict[int, LayerShape], pages: int, page_tokens: int, max_sequences: int,
        carried: Carried | None = None, together: Together | None = None, stored: Stored = "auto",
    ) -> None:  # fmt: skip
        """`together`: the ranks of an engine that is cut over devices. `stored`: how keys and values are."""
        self.policy, self._together, self._stored = policy, together, stored
        self._words = policy.head.words
        self.pages, self.page_tokens, self.batch = pages, page_tokens, max_sequences
        self.buckets = buckets(max_sequences)
        self.replays = 0
        self._shapes, self._carried = shapes, carried
        self._decode_shapes = [DecodeShape.of(s) for s in shapes.values()]
        self._layer_bytes = max(stored_bytes(s, policy.dtype, stored) for s in shapes.values())
        self._body, self.description = self._fuse()
        self.arena = Arena(self._measure(), policy.device)
        self._layout = self._lay_out(self.arena.tensor)
        self.cache = self._layout.cache
        self._draw = Draw(max_sequences, self._words, policy.device)
        self._graphs: dict[tuple[int, bool, str], torch.cuda.CUDAGraph] = {}
        self._stream = _capture_stream(policy.device)
        self._pool = torch.cuda.graph_pool_handle()
        self._index = torch.zeros(max_sequences, dtype=torch.int64, device=policy.device)
        self._shared = torch.zeros_like(self._index)
        self._items = torch.zeros((max(1, max_sequences // 2), 3), dtype=torch.int64, device=policy.device)
        self._served: list[Sequence] = []
        self._sharing = False
        self._rows: Rows | None = None
        self._copies: Arena | None = None
        """Copies of weights with adapters merged in, where decoding is faster so."""
        self.refresh()
        if self._body is not None and not self._agrees():
            self._body = None
            self.description = "the model's own modules in CUDA graphs: fused layers compute different log-probs"
        self._capturable = self._body is not None and self._in_graphs
        if not self._in_graphs:
            self.description += " (without graphs: sums between devices that share a GPU cannot be in them)"
        self._merge_undecided = self._body is not None and self._body.adapted_bytes > 0
        self._watch = Watch(self.policy.model)
        self._known_model = self._watch.look()

    @property
    def _in_graphs(self) -> bool:
        """What devices of one engine add up can be in a graph."""
        return self._together is None or self._together.in_graphs

    @property
    def non_torch_bytes(self) -> int:
        """Device memory that torch's allocator does not know of."""
        return sum(arena.nbytes for arena in self._arenas if arena.lendable and arena.mapped)

    @property
    def _arenas(self) -> list[Arena]:
        return [self.arena] if self._copies is None else [self.arena, self._copies]

    @property
    def not_lendable(self) -> str:
        return self.arena.not_lendable

    def lend(self) -> None:
        for arena in self._arenas:
            arena.lend()

    def reclaim(self) -> None:
        for arena in self._arenas:
            arena.reclaim()
        self.refresh()

    def begin(self, rows: Rows, sampling: Sampling, longest: int) -> None:
        self._follow_model()
        grown = self._body is not None and self._body.set_positions(longest)
        if rows is not self._rows or grown:
            self._forget_graphs()
        if rows is not self._rows and self._body is None:
            alone = self._together is None  # a rank that cannot go on would leave the others waiting
            self._capturable = alone and self._modules_run_without_the_host(rows, sampling)
        self._rows, self._sampling = rows, sampling
        self._served = []
        if self._merge_undecided:
            self._merge_undecided = False
            self._decide_merging()

    def refresh(self) -> None:
        """Call after the trainer's weights changed. Weights are read in place, so only copies made for adapters are rebuilt;
        while the memory is lent, `reclaim` does it."""
        if self._body is not None and all(arena.mapped for arena in self._arenas):
            self._body.refresh()

    def prefill(self, tokens_T: torch.Tensor, positions_T: torch.Tensor, plan: PrefillPlan) -> torch.Tensor:
        if self._body is not None:
            with self._whole_pass(tokens_T.shape[0]):
                return self._body.prefill(tokens_T, positions_T, plan)
        return self.policy.hidden(tokens_T, positions_T, plan)

    def _whole_pass(self, tokens: int) -> AbstractContextManager[None]:
        """A pass of the fused layers outside a graph (together.py)."""
        if self._together is None:
            return nullcontext()
        return self._together.whole_pass(tokens, self.policy.config.hidden_size, self.policy.dtype)

    def draw(self, index_B: torch.Tensor, hidden_BE: torch.Tensor) -> None:
        assert self._rows is not None
        for at in range(0, index_B.shape[0], self.batch):
            index, hidden = index_B[at : at + self.batch], hidden_BE[at : at + self.batch]
            self._sample(index, hidden, self._rows, self._sampling)

    def run(self, live: Seq[Sequence], steps: int) -> None:
        assert self._rows is not None
        size = next(b for b in self.buckets if b >= len(live)) if self._capturable else len(live)
        if live != self._served:
            self._served = []  # should memory run out before the device has been told: the same sequences may get other rows
            shared, items = self._find_shared(live)
            self._sharing = bool(items)
            if self._capturable:
                self._graph(size)
            self._serve(list(live), size, shared, items)
        graph = self._graph(size) if self._capturable else None
        for _ in range(steps):
            if graph is not None:
                graph.replay()
            else:
                self._step(size, self._sharing)
        self.replays += steps if graph is not None else 0

    def close(self) -> None:
        self._graphs.clear()
        self.cache.clear()
        vars(self).pop("_layout", None)
        self._drop_copies()
        self.arena.close()

    def _fuse(self) -> tuple[FusedBody | None, str]:
        try:
            add_up = None if self._together is None else self._together.sum
            return FusedBody(self.policy, self._shapes, add_up), "fused layers in CUDA graphs"
        except Unfusable as reason:
            return None, f"the model's own modules in CUDA graphs: {reason}"

    def _follow_model(self) -> None:
        """Begin anew with a model whose parameters were put elsewhere (`to`, `load_state_dict(assign=True)`) or whose adapters
        were switched: graphs would go on with what was there before."""
        if self._watch.look() == self._known_model:
            return
        if self._body is not None:
            self._drop_copies()
            self._body, self.description = self._fuse()
            self._merge_undecided = self._body is not None and self._body.adapted_bytes > 0
            self._capturable = self._body is not None and self._in_graphs
            self.refresh()
        self._forget_graphs()
        self._rows = None
        self._known_model = self._watch.look()

    def _measure(self) -> int:
        """Bytes of the arena, by laying it out without memory."""
        total = 0

        def count(shape: Seq[int], dtype: torch.dtype) -> torch.Tensor:
            nonlocal total
            total += piece_bytes(shape, dtype)
            return torch.empty(shape, dtype=dtype, device="meta")

        self._lay_out(count)
        return total

    def _lay_out(self, empty: Empty) -> _Layout:
        cache = KVCache(
            self._shapes, self.pages, self.page_tokens, self.policy.dtype, empty, self._carried, self._stored
        )
        space = None if self._body is None else self._body.workspace(self.batch, empty)
        partials = space.partials if space is not None else Partials(self.batch, self._decode_shapes, empty)
        return _Layout(cache, space, partials, empty((self.batch, self._words), torch.float32))

    def _batch(self, index_B: torch.Tensor, rows: Rows, items: torch.Tensor | None) -> DecodeBatch:
        shared_B = self._shared[: index_B.shape[0]]
        state = rows.state
        return DecodeBatch(index_B, rows.pages, state.positions, state.done, shared_B, items, self.page_tokens)

    def _hidden(self, batch: DecodeBatch, rows: Rows) -> torch.Tensor:
        if self._body is not None:
            assert self._layout.space is not None
            capturing = torch.cuda.is_current_stream_capturing()
            with nullcontext() if capturing else self._whole_pass(batch.index_B.shape[0]):
                return self._body.decode(batch, rows.state.last_tokens, self.cache, self._layout.space)
        plan = _ModulesPlan(batch, self.cache, self._layout.partials)
        state = rows.state
        return self.policy.hidden(state.last_tokens[batch.index_B], state.positions[batch.index_B], plan)

    def _sample(self, index_B: torch.Tensor, hidden_BE: torch.Tensor, rows: Rows, sampling: Sampling) -> None:
        head, out_BV = cast(Any, self.policy.head), self._layout.logits[: hidden_BE.shape[0]]
        if self._together is not None:
            plain = Head(head.weight_VE, head.bias_V)
            out_BV.copy_(head.gathered(plain.logits(hidden_BE), vote=not torch.cuda.is_current_stream_capturing()))
        elif hidden_BE.dtype == torch.float32:
            torch.mm(hidden_BE, head.weight_VE.t(), out=out_BV)
        else:
            torch.mm(hidden_BE, head.weight_VE.t(), out_dtype=torch.float32, out=out_BV)
        if head.bias_V is not None and self._together is None:
            out_BV += head.bias_V
        self._draw(out_BV, index_B, rows.state, sampling, head.scale, head.softcap)

    def _step(self, size: int, sharing: bool) -> None:
        assert self._rows is not None
        items = self._items[: max(1, size // 2)] if sharing else None
        batch = self._batch(self._index[:size], self._rows, items)
        with self.policy.routers.during(self._rows.recorded(batch.index_B)):
            hidden_BE = self._hidden(batch, self._rows)
        self._sample(batch.index_B, hidden_BE, self._rows, self._sampling)

    def _graph(self, size: int) -> torch.cuda.CUDAGraph:
        """The graph of a step of this size; where there is none yet it is made, on rows that are done."""
        key = (size, self._sharing, self._sampling.model_dump_json())
        if key not in self._graphs:
            assert self._rows is not None
            self._served = []
            self._index.fill_(self._rows.idle_row)
            self._items.zero_()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._step(size, self._sharing)
                self._stream.synchronize()
                graph = self._capture(size)
            torch.cuda.current_stream().wait_stream(self._stream)
            if self._together is not None:
                self._together.refuse_short()  # all have it, or none
            self._graphs[key] = graph
        return self._graphs[key]

    def _capture(self, size: int) -> torch.cuda.CUDAGraph:
        """Record a step. The garbage collector waits: what it might free meanwhile would spoil the recording."""
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        gc.disable()
        try:
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                self._step(size, self._sharing)
            finally:
                graph.capture_end()
        except BaseException:
            if not self._graphs:
                self._forget_graphs()  # its pool has ended with the one that failed
            raise
        finally:
            if collecting:
                gc.enable()
        return graph

    def _decide_merging(self) -> None:
        """Merge adapters into a copy of the weights if there is room for one and steps then take less time."""
        assert self._body is not None
        size = self._body.adapted_bytes
        beside, merged = self._time_steps(), float("inf")
        # The plan counts a copy by the same rule (plan/ledger.py).
        room = device_room(self.policy.device, self.non_torch_bytes) > 2 * size
        if self._together is not None:
            room = not self._together.vote(not room)
        if room:
            self._copies = Arena(size, self.policy.device)
            self._body.make_room(self._copies.tensor)
            self._body.refresh()
            merged = self._time_steps()
            if self._together is not None:
                beside, merged = self._together.of_first((beside, merged))
            if beside <= merged:
                self._drop_copies()
                self._body.refresh()
        how = "merged into a copy of the weights" if merged < beside else "applied beside the weights"
        self.description += f", adapters {how}"

    def _drop_copies(self) -> None:
        if self._copies is not None and self._body is not None:
            self._body.make_room(None)
            self._copies.close()
            self._copies = None

    def _time_steps(self) -> float:
        """Milliseconds of a step of a full batch and of a small one, together; their graphs are forgotten."""
        found = sum(self._time_step(size) for size in {self.batch, min(64, self.batch)})
        self._forget_graphs()
        return found

    def _time_step(self, size: int) -> float:
        """Milliseconds of a step of this size without attention: its rows are idle."""
        graph = self._graph(next(b for b in self.buckets if b >= size))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begin.record()
        for _ in range(REPLAYS_TIMED):
            graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / REPLAYS_TIMED

    def _forget_graphs(self) -> None:
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()  # a pool ends with its last graph

    def _serve(self, live: list[Sequence], size: int, shared: list[int], items: list[tuple[int, int, int]]) -> None:
        """Tell the device whom the next steps are for."""
        assert self._rows is not None
        idle = size - len(live)
        rows = [s.row for s in live] + [self._rows.idle_row] * idle
        numbers = self._rows.to_device([rows, shared + [0] * idle])
        self._index[:size], self._shared[:size] = numbers
        if items:
            room = max(1, size // 2)
            self._items[:room] = self._rows.to_device(items + [(0, 0, 0)] * (room - len(items)))
        self._served = live

    def _find_shared(self, live: Seq[Sequence]) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Find neighbours that begin with the same pages: how many pages for each entry, and the tiles that read them once.
        Latents are so small that each reads them by itself."""
        if self.cache.latents:
            return [0] * len(live), []
        shared, items, saved = [0] * len(live), [], 0
        most = min(samples_per_item(s) for s in self._decode_shapes)
        at = 0
        for group, members in groupby(live, key=lambda s: s.group):
            siblings = list(members)
            pages = len(group.prompt) // self.page_tokens
            beginning = siblings[0].pages[:pages]
            while pages and siblings:
                tile, siblings = siblings[:most], siblings[most:]
                if len(tile) > 1 and all(s.pages[:pages] == beginning for s in tile):
                    items.append((at, len(tile), pages))
                    shared[at : at + len(tile)] = [pages] * len(tile)
                    saved += (len(tile) - 1) * pages * self.page_tokens
                at += len(tile)
            at += len(siblings)
        if saved * self._layer_bytes < MIN_SAVED_BYTES_TO_SHARE:
            return [0] * len(live), []
        return shared, items

    @torch.no_grad()
    def _agrees(self) -> bool:
        """Decode a few random sequences step by step and compare with one forward of the model."""
        assert self._body is not None
        length = min(6, self.page_tokens * self.pages)
        count = max(1, min(3, self.pages // -(-length // self.page_tokens), self.batch))
        self._body.set_positions(length)
        device = self.policy.device
        tokens = torch.randint(
            0, self.policy.config.vocab_size, (count, length), generator=torch.Generator().manual_seed(1)
        )
        tokens = tokens.to(device)
        width = -(-length // self.page_tokens)
        rows = Rows(count, 1, width, 1, device)
        rows.pages[:count] = torch.arange(count * width, device=device).view(count, width)
        rows.state.done[:count] = 0
        segments = [
            PrefillSegment(row.tolist(), 0, list(range(i * width, (i + 1) * width))) for i, row in enumerate(tokens)
        ]
        prefill = PrefillPlan(self.cache, segments, device)
        filled = self._body.prefill(tokens.flatten(), prefill.positions, prefill)
        found = []
        for position in range(length):
            rows.state.last_tokens[:count], rows.state.positions[:count] = tokens[:, position], position
            found.append(self._hidden(self._batch(torch.arange(count, device=device), rows, None), rows).clone())
        plan = PackedPlan([length] * count, device)
        expected = self.policy.hidden(tokens.flatten(), plan.positions, plan)
        decoded = torch.stack(found, 1).flatten(0, 1)
        first, second, theirs = (self.policy.head.logits(x).log_softmax(-1) for x in (filled, decoded, expected))
        gap = max(((ours - theirs).abs() * theirs.exp()).sum(-1).max().item() for ours in (first, second))
        return gap <= TOLERANCE_NATS[self.policy.dtype if self._stored == "auto" else torch.bfloat16]

    def _modules_run_without_the_host(self, rows: Rows, sampling: Sampling) -> bool:
        """Try a step in which the host may not wait for the device: one that does cannot be in a graph."""
        self._rows, self._sampling = rows, sampling
        self._index.fill_(rows.idle_row)
        self._step(1, False)
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            self._step(1, False)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.description = f"the model's own modules, step by step: they wait for the host ({first_line(error)})"
            return False
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return True
