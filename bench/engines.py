"""Engines inside Trimtab: what starting, publishing weights, giving memory up and generating take.

    python bench/engines.py                                        # the shapes 0.5b and 7b on the CUDA device
    python bench/engines.py --python ~/vllm/bin/python --tiny      # a tiny model on a CPU: it shows that it runs

For each engine and shape: seconds to start; to publish all weights, and adapters of rank 16; device memory in use (NVML) while it
generates and when it has lent its memory; tokens a second by the number of sequences in flight, 8 samples of each prompt, 128 +
128 tokens. The model is random, so nothing stops early. Writes DIR/engines-DATE.json and .md after every engine.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import time
from pathlib import Path
from typing import Any

import torch
from rollout import SHAPES, random_prompts
from transformers import AutoModelForCausalLM, Qwen2Config

from trimtab.config.learn import Sampling
from trimtab.config.schema import Lora
from trimtab.data.prompt import Prompt
from trimtab.model.adapters import add_adapters
from trimtab.model.kernel_choice import fuse
from trimtab.model.policy import Policy
from trimtab.rollout.engine import Engine, Request
from trimtab.rollout.external.engine import ExternalEngine
from trimtab.rollout.external.find import interpreter
from trimtab.rollout.external.kinds import KINDS
from trimtab.rollout.native.engine import NativeEngine

RESULTS = Path(__file__).parent / "results"
TINY = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 512, "tie_word_embeddings": True}  # fmt: skip
NEW = 128


def make_policy(shape: dict[str, Any], adapters: bool, device: torch.device) -> Policy:
    config = Qwen2Config(max_position_embeddings=4096, eos_token_id=1, pad_token_id=0, bos_token_id=2, **shape)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32
        )
    policy = Policy(add_adapters(model, Lora(r=16), seed=0) if adapters else model)
    fuse(policy)
    return policy


def make_engine(kind: str, policy: Policy, sequences: int, python: str | None, processes: int) -> Engine:
    cuda = policy.device.type == "cuda"
    shape = policy.config
    token = 2 * shape.num_hidden_layers * shape.num_key_value_heads * (shape.hidden_size // shape.num_attention_heads)
    settings: dict[str, Any] = {
        "kv_bytes": int(1.1 * sequences * (128 + NEW + 32) * token * policy.dtype.itemsize) + 2**26,
        "max_sequences": sequences,
        "prefill_tokens": 16384 if cuda else 1024,
        "lend_memory": cuda,
    }
    if kind == "native":
        return NativeEngine(policy, None, [], page_tokens=64, **settings)
    where = {
        "python": interpreter(python),
        "page_tokens": 16 if cuda else 128,
        "eager": not cuda,
        "processes": processes,
    }
    return ExternalEngine(KINDS[kind], policy, None, [], longest=128 + NEW, **where, **settings)


def used_gib(device: torch.device) -> float | None:
    """Of the device, by all processes."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / 2**30


def timed(work: Any, device: torch.device) -> float:
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def measure(
    kind: str, shape: dict[str, Any], sizes: list[int], adapters: bool, python: str | None, processes: int
) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of the row before
    policy = make_policy(shape, adapters, device)
    found: dict[str, Any] = {"start_gib": used_gib(device)}
    made: list[Engine] = []
    found["start_s"] = timed(lambda: made.append(make_engine(kind, policy, max(sizes), python, processes)), device)
    engine = made[0]
    try:
        found["tokens_per_s"] = {}
        for version, sequences in enumerate([*sizes, sizes[-1]]):  # the last once more: by then all is made
            found["publish_s"] = timed(lambda version=version: engine.publish(version), device)
            for _ in range(2):  # graphs are captured and kernels compiled when they are first used
                for _ in engine.generate(requests_of(sequences, int(shape["vocab_size"]))):
                    pass
                seconds = engine.stats.decode_s + engine.stats.prefill_s
                found["tokens_per_s"][sequences] = engine.stats.generated_tokens / max(1e-9, seconds)
            found["generating_gib"] = used_gib(device)
            found["lend_s"] = timed(engine.lend, device)
            found["lent_gib"] = used_gib(device)
    finally:
        engine.close()
    return found


def requests_of(sequences: int, words: int) -> list[Request]:
    prompts = [[t % (words - 3) + 3 for t in tokens] for tokens in random_prompts(sequences // 8)]
    return [Request(Prompt(i, "", p), 8, NEW, Sampling(), seed=0, step=0) for i, p in enumerate(prompts)]


def report(found: dict[str, Any]) -> str:
    sizes = sorted({int(size) for row in found["rows"] for size in row["tokens_per_s"]})
    columns = ["start_s", "publish_s", "lend_s", "start_gib", "generating_gib", "lent_gib"]
    head = ["engine", "model", *columns, *(f"tokens/s, {size} sequences" for size in sizes)]
    lines = [f"# Engines inside Trimtab, {found['date']}, {found['machine']}", ""]
    lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in found["rows"]:
        shown = [row["engine"], row["model"], *("-" if row[c] is None else f"{row[c]:.2f}" for c in columns)]
        shown += [f"{row['tokens_per_s'][size]:,.0f}" if size in row["tokens_per_s"] else "-" for size in sizes]
        lines.append("| " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["0.5b", "7b"], choices=list(SHAPES))
    parser.add_argument("--sequences", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--engines", nargs="+", default=["native", "vllm"], choices=["native", *KINDS])
    parser.add_argument("--processes", type=int, nargs="+", default=[1], help="of an engine outside, each a row")
    parser.add_argument("--adapters", action="store_true", help="with adapters of rank 16 as well")
    parser.add_argument("--python", help="interpreter of an environment with vLLM or SGLang")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    shapes = {"tiny": TINY} if args.tiny else {name: SHAPES[name] for name in args.shapes}
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    found: dict[str, Any] = {"date": datetime.date.today().isoformat(), "machine": machine, "rows": []}
    args.out.mkdir(parents=True, exist_ok=True)
    sizes = [16] if args.tiny else sorted(args.sequences)
    tried = [(kind, count) for kind in args.engines for count in ([1] if kind == "native" else args.processes)]
    for name, shape in shapes.items():
        for adapters in [False, True][: 1 + args.adapters]:
            for kind, processes in tried:
                row = {"engine": kind + (f" x {processes}" if processes > 1 else "")}
                row["model"] = name + (", adapters" if adapters else "")
                row |= measure(kind, dict(shape), sizes, adapters, args.python, processes)
                found["rows"].append(row)
                print(row, flush=True)
                file = args.out / f"engines-{found['date']}"
                file.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
                file.with_suffix(".md").write_text(report(found))
    print(report(found))


if __name__ == "__main__":
    main()
