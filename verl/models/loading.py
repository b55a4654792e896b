"""Load and save causal LMs and value models (critic, reward model).

In: a model section of the configuration. Out: a `LoadedModel` in float32, dropout off, tokenizer
attached. Weights come from safetensors or GGUF; pickle files only when the section allows it.
"""

from __future__ import annotations

import copy
import io
import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from verl.config.schema import CriticModel, PretrainedModel, RewardModel
from verl.errors import ModelError
from verl.models.chat import load_tokenizer, stop_ids
from verl.models.gguf import read_once
from verl.seeding import derive_seed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A model with what is needed to feed it.

    `vocab_size` counts the ids that the tokenizer knows; embedding rows beyond it are padding and
    are never sampled. `score_index` picks the output of a value model.
    """

    model: nn.Module
    tokenizer: Any
    vocab_size: int
    kind: Literal["causal", "value", "encoder"]
    max_length: int | None
    score_index: int = 0


def load_causal_lm(section: PretrainedModel, role: str) -> LoadedModel:
    """Load a causal LM for `role` (actor, reference policy).

    Raises:
        ModelError: no path, nothing loadable there, only pickle weights, or weights missing (a
            reward model has no language-model head).
    """
    from transformers import AutoModelForCausalLM

    path = required_path(section, role)
    with read_once(section.gguf_file):
        with _explained(path, role):
            model, info = AutoModelForCausalLM.from_pretrained(
                path, output_loading_info=True, **_options(section)
            )
        tokenizer = tokenizer_of(section, path)
    if info["missing_keys"] and not section.gguf_file:
        raise ModelError(
            f"{role}: {path!r} lacks weights of a language model, which would be random numbers: "
            f"{', '.join(sorted(info['missing_keys'])[:5])}. Name a causal language model."
        )
    _drop_quantisation_record(model)
    _fit_vocabulary(model, tokenizer, role)
    return _finish(model, tokenizer, "causal")


def load_value_model(section: CriticModel | RewardModel, role: str, seed: int) -> LoadedModel:
    """Load a critic or reward model: a trunk with a head that gives one number per position.

    A critic, and a reward model that is about to be trained, may start from a plain language
    model: its head is drawn from N(0, 1/sqrt(hidden size + 1)) with `seed`. More than one output
    is refused unless `score_index` picks one; a critic's head is then made anew with one output.

    Raises:
        ModelError: as above, or an architecture without a sequence-classification form.
    """
    path = required_path(section, role)
    with read_once(section.gguf_file):
        model, fresh = _sequence_classifier(section, path, role, seed)
        tokenizer = tokenizer_of(section, path)
    _drop_quantisation_record(model)
    _fit_vocabulary(model, tokenizer, role)
    kind: Literal["value", "encoder"] = (
        "value" if isinstance(head_of(model), nn.Linear) else "encoder"
    )
    wanted = section.value_head_init if isinstance(section, CriticModel) else "pretrained"
    if kind == "value" and wanted == "zero":
        torch.nn.init.zeros_(head_of(model).weight)
        logger.info("%s: value head set to zero", role)
    elif kind == "value" and (fresh or wanted == "random"):
        init_value_head(model, seed, role)
        logger.info("%s: new value head, N(0, 1/sqrt(d+1)), seed %d", role, seed)
    index = getattr(section, "score_index", None) or 0
    return _finish(model, tokenizer, kind, index)


def load_reward_model(section: RewardModel, role: str = "reward_model") -> LoadedModel:
    """Load a reward model that only scores; a checkpoint without a score head is refused."""
    path = required_path(section, role)
    model, fresh = _sequence_classifier(section, path, role, seed=0)
    if fresh:
        raise ModelError(
            f"{role}: {path!r} has no score head, so its scores would be random numbers. "
            "Train one with `verl rm`, or name a reward model."
        )
    tokenizer = tokenizer_of(section, path)
    _drop_quantisation_record(model)
    _fit_vocabulary(model, tokenizer, role)
    kind: Literal["value", "encoder"] = (
        "value" if isinstance(head_of(model), nn.Linear) else "encoder"
    )
    return _finish(model, tokenizer, kind, section.score_index or 0)


def required_path(section: PretrainedModel, role: str) -> str:
    """The section's pretrained_path, or an error that names the key."""
    if not section.pretrained_path:
        raise ModelError(
            f"model.{role}.pretrained_path is not set: give a hub id or a local folder"
        )
    return section.pretrained_path


def tokenizer_of(section: PretrainedModel, path: str) -> Any:
    """The tokenizer that belongs to a model section."""
    return load_tokenizer(path, section.gguf_file, section.chat_template, section.trust_remote_code)


def _options(section: PretrainedModel) -> dict[str, Any]:
    options: dict[str, Any] = {
        "dtype": torch.float32,
        "trust_remote_code": section.trust_remote_code,
    }
    if section.gguf_file:
        options["gguf_file"] = section.gguf_file
    else:
        options["use_safetensors"] = None if section.allow_pickle_weights else True
    return options


@contextmanager
def _explained(path: str, role: str) -> Iterator[None]:
    from safetensors import SafetensorError

    with _quiet():
        try:
            yield
        # RuntimeError: stored shapes that do not fit the folder's own config.json.
        except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
            raise ModelError(_load_advice(path, role, error)) from error


@contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging as transformers_logging

    # Its bars and load reports would bury our own lines; what they say is checked below.
    shown = transformers_logging.is_progress_bar_enabled()
    level = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        # The GGUF reader has a bar of its own that no setting turns off (transformers 5.19).
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers_logging.set_verbosity(level)
        if shown:
            transformers_logging.enable_progress_bar()


def _load_advice(path: str, role: str, error: Exception) -> str:
    folder = Path(path)
    if folder.is_dir():
        names = set(os.listdir(folder))
        if any(name.endswith(".bin") for name in names) and not any(
            name.endswith(".safetensors") for name in names
        ):
            return (
                f"{role}: {path!r} holds only pickle weights (.bin), which can run code when loaded. "
                "Convert them to safetensors, or set `allow_pickle_weights: true` for this model."
            )
        gguf = sorted(name for name in names if name.endswith(".gguf"))
        if gguf and "config.json" not in names:
            return (
                f"{role}: {path!r} holds GGUF weights; set `gguf_file: {gguf[0]}` for this model."
            )
    return f"{role}: cannot load {path!r}: {error}"


def _sequence_classifier(section: Any, path: str, role: str, seed: int) -> tuple[nn.Module, bool]:
    """Return the classifier with the right number of outputs and whether its head is new."""
    if section.gguf_file:
        _check_score_index(section, path, role, 1)
        return _classifier_from_gguf(section, path, role), True
    from transformers import AutoConfig, AutoModelForSequenceClassification

    with _explained(path, role):
        config = AutoConfig.from_pretrained(path, trust_remote_code=section.trust_remote_code)
    outputs = _stored_outputs(config)
    if outputs not in (None, 1) and isinstance(section, CriticModel):
        logger.warning(
            "%s: %s has %d outputs; a new head with one replaces it", role, path, outputs
        )
    else:
        _check_score_index(section, path, role, outputs or 1)
    wanted = outputs if outputs and isinstance(section, RewardModel) else 1
    # Seeded: a head that the checkpoint lacks is drawn here (an encoder's is not drawn again).
    with _explained(path, role), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, info = AutoModelForSequenceClassification.from_pretrained(
            path,
            num_labels=wanted,
            output_loading_info=True,
            ignore_mismatched_sizes=isinstance(section, CriticModel),
            **_options(section),
        )
    lost = [*info["missing_keys"], *(item[0] for item in info["mismatched_keys"])]
    trunk = f"{model.base_model_prefix}."
    head = [key for key in lost if not key.startswith(trunk) or ".pooler." in key]
    missing = sorted(set(lost) - set(head))
    if missing:
        raise ModelError(f"{role}: weights missing in {path!r}: {', '.join(missing[:5])}")
    return model, bool(head)


def _stored_outputs(config: Any) -> int | None:
    """Outputs of the stored head; None when the checkpoint is no sequence classifier."""
    architectures = getattr(config, "architectures", None) or []
    if not any("SequenceClassification" in name for name in architectures):
        return None
    return int(config.num_labels)


def _check_score_index(section: Any, path: str, role: str, outputs: int) -> None:
    index = getattr(section, "score_index", None)
    if index is None:
        if outputs == 1:
            return
        raise ModelError(
            f"{role}: {path!r} has {outputs} outputs, and nothing says which one is the reward. "
            f"Set model.{role}.score_index to a number from 0 to {outputs - 1}."
        )
    if index >= outputs:
        raise ModelError(
            f"{role}: score_index is {index}, but {path!r} has {outputs} output(s), counted from 0"
        )


def _classifier_from_gguf(section: Any, path: str, role: str) -> nn.Module:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    with _explained(path, role):
        causal = AutoModelForCausalLM.from_pretrained(path, **_options(section))
        config = causal.config
        config.num_labels = 1
        _drop_quantisation_record(causal)
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    trunk_of(model).load_state_dict(causal.base_model.state_dict())
    return model


def _drop_quantisation_record(model: nn.Module) -> None:
    # GGUF weights are dequantised on loading; the record would make transformers refuse to save
    # or train the float32 model (transformers 5.19).
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
    for name in ("is_quantized", "hf_quantizer", "quantization_method"):
        if hasattr(model, name):
            setattr(model, name, None if name != "is_quantized" else False)


def _fit_vocabulary(model: nn.Module, tokenizer: Any, role: str) -> None:
    """Give every token id an embedding row; tokens added to a tokenizer come without one."""
    rows = model.get_input_embeddings().weight.shape[0]
    needed = highest_id(tokenizer) + 1
    if needed > rows:
        logger.warning("%s: tokenizer has %d ids, model %d rows; resized", role, needed, rows)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(0, "resize-embeddings", rows, needed))
            model.resize_token_embeddings(needed, mean_resizing=False)


def highest_id(tokenizer: Any) -> int:
    """Largest token id the tokenizer can produce."""
    return max(tokenizer.get_vocab().values())


def _finish(model: nn.Module, tokenizer: Any, kind: Any, score_index: int = 0) -> LoadedModel:
    disable_dropout(model)
    model.eval()
    rows = model.get_input_embeddings().weight.shape[0]
    vocab = min(highest_id(tokenizer) + 1, rows)
    return LoadedModel(model, tokenizer, vocab, kind, longest_input(model), score_index)


def longest_input(model: nn.Module) -> int | None:
    """Most tokens the model has positions for; None when its configuration sets no limit."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for name, module in model.named_modules():
        # RoBERTa and its kin count positions from behind the padding index.
        if limit and name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            limit -= 0 if module.padding_idx is None else module.padding_idx + 1
    return limit


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability to 0: a probability must not change between two passes."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def trunk_of(model: nn.Module) -> nn.Module:
    """The transformer without its head: gives hidden states (…, H)."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return getattr(base, base.base_model_prefix)


def head_of(model: nn.Module) -> nn.Module | None:
    """The score head of a decoder value model; None for encoders, which pool in their own way."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return getattr(base, "score", None)


def init_value_head(model: nn.Module, seed: int, role: str) -> None:
    """Draw the head from N(0, 1/sqrt(d+1)), the initialisation of Stiennon et al. 2020."""
    head = head_of(model)
    if not isinstance(head, nn.Linear):
        raise ModelError(f"{role}: {type(model).__name__} has no linear `score` head")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        draws = torch.randn(head.weight.shape, generator=generator)
        head.weight.copy_(draws / math.sqrt(head.in_features + 1))


def safe_pad_id(tokenizer: Any, vocab_size: int) -> int:
    """An id to pad with that no conversation ends in, so that padding can be told from text."""
    ends = set(stop_ids(tokenizer))
    names = [tokenizer.pad_token_id, tokenizer.unk_token_id, *sorted(tokenizer.all_special_ids)]
    # Last resort, for tokenizers whose one special token ends texts (GPT-2): an ordinary token.
    for token in [*names, *range(vocab_size - 1, -1, -1)]:
        if token is not None and token not in ends and token < vocab_size:
            return int(token)
    return 0


def save_model(loaded: LoadedModel, folder: Path) -> None:
    """Write a Hugging Face folder: safetensors, config, tokenizer with its chat template.

    Value models are saved as `AutoModelForSequenceClassification(num_labels=1)` with a padding id
    that is not the end-of-turn token, so that plain transformers reads the score at the right place.
    Adapters are merged into the weights.
    """
    model = merged(loaded.model)
    tokenizer = copy.deepcopy(loaded.tokenizer)
    pad = safe_pad_id(tokenizer, loaded.vocab_size)
    end = tokenizer.eos_token_id
    if loaded.kind == "causal" and end is not None and pad not in tokenizer.all_special_ids:
        # A language model needs no padding it can tell from text, and a tokenizer would leave an
        # ordinary token out of decoded text once it is the padding token.
        pad = int(end)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    model.config.pad_token_id = pad
    model.config.use_cache = True
    if getattr(model, "generation_config", None) is not None and loaded.kind == "causal":
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig(
            eos_token_id=list(stop_ids(tokenizer)), pad_token_id=pad
        )
    with _quiet():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def merged(model: nn.Module) -> nn.Module:
    """The plain transformers model; adapters are merged in a copy."""
    if not hasattr(model, "merge_and_unload"):
        return model
    return copy.deepcopy(model).merge_and_unload()
