"""Which weights of a model are trained: all of them, the top blocks, or low-rank adapters."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from verl.config.schema import TrainedModel
from verl.errors import MissingDependencyError, ModelError
from verl.models.loading import trunk_of


def prepare_for_training(model: nn.Module, section: TrainedModel, role: str) -> nn.Module:
    """Freeze what is not trained and add adapters; returns the model to use from here on."""
    if section.lora is not None:
        model = _with_lora(model, section, role)
    elif section.train_layers is not None:
        train_top_blocks(model, section.train_layers, role)
    if section.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()  # transformers recomputes only in training mode; dropout is 0 everywhere
    return model


def _with_lora(model: nn.Module, section: TrainedModel, role: str) -> nn.Module:
    try:
        import peft
    except ImportError as error:
        raise MissingDependencyError(
            f"model.{role}.lora needs the package peft: pip install peft"
        ) from error
    lora = section.lora
    assert lora is not None
    value_model = hasattr(model, "score")
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        target_modules=_adapted_layers(model, section, role),
        task_type="SEQ_CLS" if value_model else "CAUSAL_LM",
        modules_to_save=["score"] if value_model else None,
    )
    return peft.get_peft_model(model, config)


def _adapted_layers(model: nn.Module, section: TrainedModel, role: str) -> list[str] | str:
    """What gets adapters: the named layers, with `train_layers` only those of the top blocks."""
    assert section.lora is not None
    wanted = section.lora.target_modules
    if section.train_layers is None:
        return wanted
    top = _top_blocks(model, section.train_layers, role)
    inside = {id(module) for block in top for module in block.modules()}
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and id(module) in inside
        and (wanted == "all-linear" or name.rpartition(".")[2] in wanted)
    ]
    if not names:
        raise ModelError(
            f"model.{role}.lora.target_modules: {wanted} names no linear layer in the top "
            f"{len(top)} blocks"
        )
    return names


def transformer_blocks(model: nn.Module) -> nn.ModuleList:
    """The list of transformer blocks of a trunk, whatever it is called there."""
    trunk = trunk_of(model)
    count = trunk.config.get_text_config().num_hidden_layers
    for _, module in trunk.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ModelError(f"{type(trunk).__name__}: cannot find its {count} transformer blocks")


def _top_blocks(model: nn.Module, count: int, role: str) -> list[nn.Module]:
    blocks = list(transformer_blocks(model))
    if count > len(blocks):
        raise ModelError(
            f"model.{role}.train_layers is {count}, but there are {len(blocks)} blocks"
        )
    return blocks[-count:]


def train_top_blocks(model: nn.Module, count: int, role: str) -> None:
    """Freeze everything but the last `count` blocks, the final norm and the value head."""
    block_ids = {id(p) for block in transformer_blocks(model) for p in block.parameters()}
    top = {id(p) for block in _top_blocks(model, count, role) for p in block.parameters()}
    embedding = {id(p) for p in model.get_input_embeddings().parameters()}
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    embedding |= {id(p) for p in output.parameters()} if output is not None else set()
    positions = {
        id(p)
        for name, module in trunk_of(model).named_modules()
        if isinstance(module, nn.Embedding)
        for p in module.parameters()
    }
    for name, parameter in model.named_parameters():
        key = id(parameter)
        # "embed" in the name: norms that belong to the embeddings (BERT, BLOOM) stay frozen too.
        below = key in embedding or key in positions or "embed" in name
        frozen = below or (key in block_ids and key not in top)
        parameter.requires_grad_(not frozen)


def frozen_copy(model: nn.Module) -> nn.Module:
    """A frozen twin for the reference policy that shares the tensors which are never trained.

    Trained tensors are copied, so updates of the policy leave the twin bitwise unchanged.
    """
    shared: dict[int, Any] = {
        id(tensor): tensor
        for tensor in [*model.parameters(), *model.buffers()]
        if not tensor.requires_grad
    }
    twin = copy.deepcopy(model, memo=shared)
    return twin.requires_grad_(False)
