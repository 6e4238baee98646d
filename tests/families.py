"""Every decoder family that transformers has, tried with a tiny random model: which are fused, which run through their own
modules, which are refused and why. `python -m tests.families` writes docs/models.md; tests/model/test_families.py checks it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from tiny import ARCHITECTURES, BASE, HYBRIDS, MIXTURE_HYBRIDS, RELATIVES
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from trimtab.base.errors import ModelError, first_line
from trimtab.model.load import refuse_unsupported
from trimtab.model.policy import Policy
from trimtab.model.sizes import FUSED_FAMILIES
from trimtab.model.text_part import WRAPPERS, sees

PAGE = Path(__file__).parent.parent / "docs/models.md"
BEGIN, END = "<!-- generated: python -m tests.families -->", "<!-- end -->"
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "moe_num_experts": 4, "moe_k": 2, "head_dim": 8,
}  # fmt: skip
LATENT = {name: value for name, value in EXPERTS.items() if name != "head_dim"} | {
    "q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    **MIXTURE_HYBRIDS,
    **HYBRIDS,
    "gemma4_text": {
        "head_dim": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": BASE["vocab_size"],
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 5,
    },
}  # fmt: skip
"""Sizes of families that need others than everybody's."""
MOST_PARAMETERS = 3_000_000


@dataclass(frozen=True)
class Family:
    """What became of a family."""

    kind: str
    made: str
    """The class of its language model."""
    way: str
    """fused, plain, text part, refused or not tried."""
    why: str = ""


def kinds() -> list[str]:
    return sorted(AutoModelForCausalLM._model_mapping._model_mapping)


def made_of(kind: str) -> str:
    return str(AutoModelForCausalLM._model_mapping._model_mapping[kind])


def tiny_configs(kind: str) -> Iterator[Any]:
    """Configs of small models, the likeliest first."""
    if kind in OWN:
        yield AutoConfig.for_model(kind, **BASE | OWN[kind])
        return
    for more in ({}, EXPERTS, LATENT):
        with suppress(Exception):  # whatever its validators raise
            yield AutoConfig.for_model(kind, **BASE | ARCHITECTURES.get(kind, RELATIVES.get(kind, {})) | more)


def tiny_of(kind: str, dtype: torch.dtype = torch.float64) -> Any:
    """A random model of the family; raises a ModelError where it is refused, ValueError where no small one could be built."""
    told = None
    for config in tiny_configs(kind):
        try:
            return _built(kind, config, dtype)
        except ModelError as error:
            if "cannot run through" not in str(error):
                raise
            told = told or error  # by other sizes it may run
        except Exception:  # whatever a config of other sizes makes its code raise
            continue
    raise told or ValueError("no small model of it could be built")


def _built(kind: str, config: Any, dtype: torch.dtype) -> Any:
    if sees(config):
        raise ModelError("it is more than a language model")
    made = AutoModelForCausalLM._model_mapping[type(config)]
    refuse_unsupported(made, made.__name__, config.get_text_config())
    with torch.device("meta"):
        count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError("too large")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="eager").eval()
    Policy(model)
    return model


def look_at(kind: str) -> Family:
    """What becomes of a family."""
    if kind in WRAPPERS:
        return Family(kind, made_of(kind), "text part", f"as `{CONFIG_MAPPING[kind]().text_config.model_type}`")
    try:
        tiny_of(kind)
    except ModelError as error:
        return Family(kind, made_of(kind), "refused", reason(str(error), made_of(kind)))
    except ValueError as error:
        return Family(kind, made_of(kind), "not tried", str(error))
    return Family(kind, made_of(kind), "fused" if kind in FUSED_FAMILIES else "plain")


def reason(told: str, made: str) -> str:
    """An error's message as a cell of the table."""
    told = first_line(ValueError(told)).partition(" The nearest family")[0].removeprefix(f"{made} ")
    told = told.removeprefix("cannot run through Trimtab's attention: ")
    if "does not use transformers' attention interface" in told:
        return "it does not use transformers' attention interface"
    return re.sub(r"; Trimtab supports .*", "", told).removesuffix(".").replace("|", "\\|")


def table(families: list[Family]) -> str:
    rows = [f"| `{f.kind}` | {f.made} | {f.way} | {f.why} |" for f in families]
    return "\n".join(["| `model_type` | class | runs through | why |", "|---|---|---|---|", *rows])


def written(page: str, families: list[Family]) -> str:
    """The page with its table made anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table(families)}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(), [look_at(kind) for kind in kinds()]))
