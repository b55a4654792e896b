"""The tutorial that users were promised runs as written: only model ids and sizes are changed.

The snippets below are its code, line for line; `TINY` is every change that is made to them.
"""

from __future__ import annotations

import re
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from verl.errors import ConfigError, PlacementError

SEEDS = Path(__file__).resolve().parents[3] / "shared" / "seeds"

IMPORTS = """
import verl
print(verl.__version__)
from verl import Trainer, DataProvider
from verl.trainer.ppo import PPOTrainer
from verl.utils.model import create_llm_model
trainer = Trainer(config={})
ppo_trainer = PPOTrainer(config={})
_ = create_llm_model(model_name="dummy", config={})
"""

CONFIG = """
from verl.utils.config import get_default_config
config = get_default_config()
config.model.actor.pretrained_path = "meta-llama/Llama-2-7b-hf"
config.model.critic.pretrained_path = "meta-llama/Llama-2-7b-hf"
config.model.ref_policy.pretrained_path = "meta-llama/Llama-2-7b-hf"
config.model.reward_model.pretrained_path = "OpenAssistant/reward-model-deberta-v3-base"
config.train.ppo.clip_epsilon = 0.2
config.train.ppo.kl_coef = 0.1
config.train.ppo.gamma = 0.99
config.train.ppo.lam = 0.95
config.resource.actor = {"gpu": [0, 1, 2, 3]}
config.resource.critic = {"gpu": [4, 5]}
config.resource.reward_model = {"gpu": [6]}
config.resource.ref_policy = {"gpu": [0, 1, 2, 3]}
config.data.batch_size = 32
config.data.seq_length = 1024
config.train.num_epochs = 10
"""

LOOP = """
import torch
from verl import Trainer
from verl.trainer.ppo import PPOTrainer
from verl.utils.data import PromptDataset
from verl.utils.model import create_llm_model
from config import config
trainer = Trainer(config=config)
actor = create_llm_model(model_type="actor", config=config.model.actor)
critic = create_llm_model(model_type="critic", config=config.model.critic)
ref_policy = create_llm_model(model_type="ref_policy", config=config.model.ref_policy)
reward_model = create_llm_model(model_type="reward_model", config=config.model.reward_model)
ppo_trainer = PPOTrainer(
    actor=actor, critic=critic, ref_policy=ref_policy, reward_model=reward_model, config=config.train.ppo
)
dataset = PromptDataset(file_path="data/prompt.jsonl", tokenizer=actor.tokenizer)
dataloader = torch.utils.data.DataLoader(dataset, batch_size=config.data.batch_size, shuffle=True)
for epoch in range(config.train.num_epochs):
    for step, batch in enumerate(dataloader):
        rollout_outputs = ppo_trainer.rollout(batch["prompt"])
        reward_outputs = ppo_trainer.compute_rewards(rollout_outputs)
        advantage_outputs = ppo_trainer.compute_advantages(reward_outputs)
        loss_dict = ppo_trainer.update(advantage_outputs)
        if step % 10 == 0:
            print(f"Epoch {epoch} | Step {step} | "
                  f"Policy Loss: {loss_dict['policy_loss']:.4f} | "
                  f"Value Loss: {loss_dict['value_loss']:.4f} | "
                  f"KL: {loss_dict['kl'].item():.4f}")
    print(f" Epoch {epoch} completed")
"""

AVERAGE_REWARD = """
if step % 10 == 0:
    avg_reward = reward_outputs["rewards"].mean().item()
    print(f"... | Avg Reward: {avg_reward:.3f}")
"""

OFFLOAD = """
config.model.ref_policy.offload = True
config.model.ref_policy.inference_dtype = "bf16"
"""

NORMALISE = """
config.train.ppo.normalize_reward = True
config.train.ppo.whiten_advantage = True
"""

VLLM = """
config.model.actor.use_vllm = True
config.model.actor.vllm_config.tensor_parallel_size = 4
"""

SNIPPETS = (IMPORTS, CONFIG, LOOP, AVERAGE_REWARD, OFFLOAD, NORMALISE, VLLM)
LINE = re.compile(
    r"Epoch (\d+) \| Step (\d+) \| Policy Loss: (-?\d+\.\d{4}) \| Value Loss: (\d+\.\d{4}) "
    r"\| KL: (-?\d+\.\d{4})"
)


@pytest.fixture
def tiny(tiny_llama: Path, tiny_reward: Path) -> Callable[[str], str]:
    """The changes: two model ids, sizes, and the placement of a machine without GPUs."""
    changes = {
        "meta-llama/Llama-2-7b-hf": str(tiny_llama),
        "OpenAssistant/reward-model-deberta-v3-base": str(tiny_reward),
        "seq_length = 1024": "seq_length = 96\nconfig.data.response_length = 8",
        "batch_size = 32": "batch_size = 4",
        "num_epochs = 10": "num_epochs = 2",
        '{"gpu": [0, 1, 2, 3]}': '{"cpu": 1}',
        '{"gpu": [4, 5]}': '{"cpu": 1}',
        '{"gpu": [6]}': '{"cpu": 1}',
    }

    def change(code: str) -> str:
        for old, new in changes.items():
            assert old in code, f"{old!r} is no longer in the snippet"
            code = code.replace(old, new)
        return code

    return change


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with ten prompts, in which `from config import config` finds config.py."""
    (tmp_path / "data").mkdir()
    lines = "".join(f'{{"prompt": "What is {i} + {i}?"}}\n' for i in range(10))
    (tmp_path / "data" / "prompt.jsonl").write_text(lines)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("config", None)


def play(folder: Path, config: str, loop: str = LOOP) -> dict[str, Any]:
    """`python train_ppo.py`, in this process; returns the variables it ends with."""
    sys.modules.pop("config", None)
    (folder / "config.py").write_text(config)
    (folder / "train_ppo.py").write_text(loop)
    return runpy.run_path(str(folder / "train_ppo.py"), run_name="__main__")


def weights(group: Any) -> dict[str, Any]:
    return dict(group.workers[0].engine.model.named_parameters())


@pytest.mark.skipif(not SEEDS.is_dir(), reason="the tutorial's text is not beside the project")
def test_the_snippets_are_the_tutorials_code_line_for_line():
    def compact(text: str) -> str:
        return re.sub(r"\s+", "", text)

    text = compact("".join(file.read_text() for file in sorted(SEEDS.glob("*.txt"))))
    lines = [line for snippet in SNIPPETS for line in snippet.splitlines() if line.strip()]
    assert len(lines) > 60
    assert [line for line in lines if compact(line) not in text] == []


def test_import_checks_with_empty_and_dummy_configurations(capsys):
    found: dict[str, Any] = {}
    exec(IMPORTS, found)
    assert tuple(map(int, capsys.readouterr().out.splitlines()[0].split("."))) >= (0, 3, 0)
    assert found["DataProvider"](config={}).config.data.batch_size == 32
    with pytest.raises(ConfigError, match="has no actor; make it with create_llm_model"):
        found["ppo_trainer"].rollout(["Hello"])
    with pytest.raises(ConfigError, match="'dummy' is not loaded: pass model_type"):
        found["_"].tokenizer  # noqa: B018


def test_config_keeps_every_assignment():
    found: dict[str, Any] = {}
    exec(CONFIG, found)
    config = found["config"]
    for line in CONFIG.splitlines():
        if line.startswith("config."):
            key, _, value = line.partition(" = ")
            assert eval(key, found) == eval(value), key
    # A section handed around alone still belongs to its tree.
    assert config.train.ppo.root is config


def test_gpus_that_are_not_there_are_an_error_whose_advice_works(folder, capsys):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has GPUs")
    with pytest.raises(PlacementError) as caught:
        play(folder, CONFIG)
    message = str(caught.value)
    assert caught.value.exit_code == 3
    assert "needs 7 (indices [0, 1, 2, 3, 4, 5, 6])" in message
    assert "this machine has 0" in message
    assert "Loading" not in capsys.readouterr().out, "told before any model is loaded"

    advice = re.findall(r'resource\.\w+ = \{"cpu": 1\}', message)
    assert [line.split()[0] for line in advice] == [
        f"resource.{role}" for role in ("actor", "critic", "ref_policy", "reward_model")
    ]
    found: dict[str, Any] = {}
    exec(
        CONFIG + "".join(f"config.{line}\n" for line in advice) + "from verl import Trainer", found
    )
    found["Trainer"](config=found["config"])
    assert "actor cpu[0], critic cpu[0]" in capsys.readouterr().out


def test_the_same_placement_on_the_command_line_ends_with_exit_code_3(folder, tiny_llama, run_verl):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has GPUs")
    code, text = run_verl(
        "ppo", f"data.train={folder}/data/prompt.jsonl", f"model.actor.pretrained_path={tiny_llama}",
        f"model.reward_model.pretrained_path={tiny_llama}", 'resource.actor={"gpu": [0, 1, 2, 3]}',
        "--dry-run",
    )  # fmt: skip
    assert code == 3, text
    assert "needs 4 (indices [0, 1, 2, 3]) for actor" in text
    assert 'resource.actor = {"cpu": 1}' in text


def test_the_loop_trains_and_prints_what_the_tutorial_shows(folder, tiny, capsys):
    from verl.trainer import ppo_task

    found = play(folder, tiny(CONFIG))
    printed = capsys.readouterr().out
    for start in ("Initializing ResourcePool: actor cpu[0]", "Loading ", " Epoch 1 completed"):
        assert start in printed
    numbers = LINE.findall(printed)
    assert [(epoch, step) for epoch, step, *_ in numbers] == [("0", "0"), ("1", "0")]
    assert abs(float(numbers[0][4])) < 1e-3, "policy and reference start equal"
    assert float(numbers[0][3]) > 0
    # Ten prompts in batches of four, twice; four optimiser steps in each.
    assert found["ppo_trainer"].steps_done == 6
    assert found["actor"].workers[0].engine.optimizer.steps_taken == 24
    start, end = weights(found["ref_policy"]), weights(found["actor"])
    assert start.keys() == end.keys()
    assert any(not start[name].equal(end[name].detach()) for name in start), "nothing was learned"
    assert type(found["ppo_trainer"]) is ppo_task.PPOTrainer, "`verl ppo` runs another class"


def test_a_base_model_without_a_chat_template_reads_the_prompt_as_it_is(folder, tiny, tiny_llama):
    base = shutil.copytree(tiny_llama, folder / "base", ignore=shutil.ignore_patterns("*.jinja"))
    config = tiny(CONFIG).replace(str(tiny_llama), str(base)) + "config.train.num_epochs = 1\n"
    found = play(folder, config)
    tokenizer, outputs = found["actor"].tokenizer, found["rollout_outputs"]
    assert tokenizer.chat_template is None
    for prompt, row, length in zip(
        outputs["prompt"], outputs["input_ids"], outputs["prompt_length"], strict=True
    ):
        assert tokenizer.decode(row[:length]) == prompt


def test_average_reward_is_the_raw_score_while_the_shaped_one_is_normalised(folder, tiny, capsys):
    into_the_loop = "".join(f"        {line}\n" for line in AVERAGE_REWARD.strip().splitlines())
    loop = LOOP.replace("        if step % 10", into_the_loop + "        if step % 10", 1)
    found = play(folder, tiny(CONFIG) + NORMALISE, loop)
    assert len(re.findall(r"\.\.\. \| Avg Reward: -?\d+\.\d{3}\n", capsys.readouterr().out)) == 2
    outputs, advantages = found["reward_outputs"], found["advantage_outputs"]
    scored = found["reward_model"].workers[0].source.score(outputs["prompt"], outputs["response"])
    assert outputs["rewards"].tolist() == pytest.approx(scored.tolist(), abs=1e-6)
    assert outputs["shaped_score"].mean().item() == pytest.approx(0, abs=1e-4)
    assert outputs["shaped_score"].std().item() == pytest.approx(1, abs=1e-2)
    valid = advantages["advantages"][advantages["response_mask"]]
    assert valid.mean().item() == pytest.approx(0, abs=1e-5)
    assert valid.std().item() == pytest.approx(1, abs=1e-2)


def test_reference_in_bfloat16_with_offload(folder, tiny, capsys):
    import torch

    found = play(folder, tiny(CONFIG) + OFFLOAD)
    assert {p.dtype for p in weights(found["ref_policy"]).values()} == {torch.bfloat16}
    assert found["config"].model.ref_policy.inference_dtype == "bfloat16"
    first = LINE.findall(capsys.readouterr().out)[0]
    assert abs(float(first[4])) < 0.05, "bfloat16 rounding only"


def test_vllm_of_a_later_version_is_refused_by_name(run_verl):
    with pytest.raises(
        ConfigError, match=r"'model.actor.use_vllm'.*`native` engine; remove the key"
    ):
        exec(CONFIG + VLLM, {})
    code, text = run_verl("ppo", "model.actor.use_vllm=true", "--dry-run")
    assert code == 2, text
    assert "model.actor.use_vllm" in text


@pytest.mark.parametrize("kind", ["bert", "deberta"])
def test_an_encoder_scores_question_and_answer_as_it_was_trained_to(kind, folder, tiny):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    scorer = save_encoder(folder / kind, kind)
    config = tiny(CONFIG) + f'\nconfig.model.reward_model.pretrained_path = "{kind}"\n'
    outputs = play(folder, config + "config.train.num_epochs = 1\n")["reward_outputs"]
    model = AutoModelForSequenceClassification.from_pretrained(scorer).eval()
    tokenizer = AutoTokenizer.from_pretrained(scorer)
    expected = [
        model(**tokenizer(str(question), answer, return_tensors="pt")).logits.item()
        for question, answer in zip(outputs["prompt"], outputs["response"], strict=True)
    ]
    assert outputs["rewards"].tolist() == pytest.approx(expected, abs=1e-4)
    assert outputs["values"].shape == outputs["response_mask"].shape, "the critic is causal"


def save_encoder(folder: Path, kind: str) -> Path:
    """A random reward model that reads [CLS] question [SEP] answer [SEP], with its tokenizer."""
    import torch
    import transformers as hf
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]",
        unk_token="[UNK]", model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip
    shape = {
        "vocab_size": len(tokens), "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0,
        "num_attention_heads": 4, "intermediate_size": 64, "num_labels": 1,
    }  # fmt: skip
    relative = {"relative_attention": True, "position_buckets": 16, "pos_att_type": ["p2c", "c2p"]}
    torch.manual_seed(1)
    model: Any = (
        hf.BertForSequenceClassification(hf.BertConfig(**shape, initializer_range=0.2))
        if kind == "bert"
        else hf.DebertaV2ForSequenceClassification(
            hf.DebertaV2Config(**shape, **relative, type_vocab_size=2, initializer_range=0.2)
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
