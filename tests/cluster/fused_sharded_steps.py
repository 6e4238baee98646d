"""What two ranks do for test_fused_sharded.py: fused layers on weights that they hold in parts, in Triton's interpreter."""

from __future__ import annotations

import gc
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from tests.cluster.sharded_steps import Case, Ranked, model_of
from trimtab.cluster import mesh as meshes
from trimtab.cluster.mesh import Meeting, Mesh
from trimtab.model import kernel_choice, policy
from trimtab.model.handed import HandedGradients
from trimtab.model.kernel_choice import use_kernels

CPU = torch.device("cpu")
SMALL = {"num_hidden_layers": 2}
CASES = [
    Case("tied", changes={**SMALL, "tie_word_embeddings": True}, settings={"checkpoint_activations": True}, prefetch=2),
    Case("untied", changes=SMALL),
    Case("half", torch.bfloat16, SMALL),
]
ADAPTED = Case("adapters", changes=SMALL)


def adapted(case: Case) -> Any:
    torch.manual_seed(0)
    return get_peft_model(model_of(case), LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False))


class Fused(Ranked):
    """With fused layers. Little is computed: the interpreter takes its time."""

    count, budget = 4, 9

    def __init__(self, mesh: Mesh, model: Any, case: Case) -> None:
        super().__init__(mesh, model, case)
        self.updater.policy.gradients = None  # as before there is an optimizer
        use_kernels(self.policy, "auto")
        self.policy.add_gradients_to(self.updater.optimizer.gradients)


def run_rank(rank: int, port: int, folder: Path, names: list[str]) -> None:
    gc.freeze()  # what the test's process has left to be collected is not this one's to end
    torch.set_num_threads(1)
    meshes.START_TIMEOUT = meshes.STEP_TIMEOUT = timedelta(seconds=60)
    kernel_choice.suits = lambda device, dtype: True
    policy.PROBE_LENGTHS[:] = [3, 2]
    mesh = Mesh(Meeting(port, "fused", rank, 2, "gloo", CPU), 2)
    for name in names:
        if name == "adapters":
            found = _adapted(mesh)
        elif name == "lost":
            found = _lost(mesh)
        else:
            case = next(case for case in CASES if case.name == name)
            found = steps(Fused(mesh, model_of(case), case))
        _save(folder / f"{name}.pt", rank, found)
    mesh.leave()


def _adapted(mesh: Mesh) -> dict[str, Any]:
    ranked = Fused(mesh, adapted(ADAPTED), ADAPTED)
    ranked.accumulate()
    gradient = {name: grad for name, grad in ranked.gradient().items() if "lora" in name}
    ranked.updater.abandon()
    with torch.no_grad(), ranked.policy.model.disable_adapter():
        without = ranked.policy.probe()
    return {"gradient": gradient, "said": ranked.policy.description, "without": without}


def steps(ranked: Fused) -> dict[str, Any]:
    handed: list[Any] = []
    _note(ranked, handed)
    ranked.accumulate()
    alive = sum(ref() is not None for ref in handed)
    gradient = ranked.gradient()
    ranked.updater.prepare()
    norms = [ranked.updater.apply(1e-2).grad_norm]
    said = ranked.policy.description
    return {
        "gradient": gradient, "norms": norms, "weights": ranked.weights(), "said": said, "handed": len(handed), "alive": alive,
    }  # fmt: skip


def _note(ranked: Fused, handed: list[Any]) -> None:
    """Have what is handed over to FSDP2 noted, without keeping it."""
    gradients = ranked.updater.optimizer.gradients
    of, own = gradients.of, {id(p) for p in ranked.updater.optimizer._replicated}  # type: ignore[attr-defined]

    def noted(*parameters: torch.Tensor) -> torch.Tensor | None:
        found = of(*parameters)
        if found is not None and id(parameters[0]) not in own:
            handed.append(weakref.ref(found.untyped_storage()))
        return found

    gradients.of = noted  # type: ignore[method-assign]


def _lost(mesh: Mesh) -> dict[str, Any]:
    """Another version of torch, which does not take what is handed over."""
    of = HandedGradients.of

    def lost(gradients: HandedGradients, *parameters: torch.Tensor) -> torch.Tensor | None:
        found = of(gradients, *parameters)
        return None if found is None else torch.zeros_like(found)

    HandedGradients.of = lost  # type: ignore[method-assign]
    try:
        ranked = Fused(mesh, model_of(CASES[1]), CASES[1])
    finally:
        HandedGradients.of = of  # type: ignore[method-assign]
    ranked.accumulate()
    found = {"said": ranked.policy.description, "fused": ranked.policy.fused, "gradient": ranked.gradient()}
    ranked.updater.abandon()
    return found


def _save(file: Path, rank: int, found: Any) -> None:
    if rank == 0:
        torch.save(found, file)
