# examples/tutorial/train_ppo.py
import json
from pathlib import Path

import torch
from config import config

from verl import Trainer
from verl.trainer.ppo import PPOTrainer
from verl.utils.data import PromptDataset
from verl.utils.model import create_llm_model

# Check the settings and the devices before anything is loaded.
trainer = Trainer(config=config)

# One group of workers per role.
actor = create_llm_model(model_type="actor", config=config.model.actor)
critic = create_llm_model(model_type="critic", config=config.model.critic)
ref_policy = create_llm_model(model_type="ref_policy", config=config.model.ref_policy)
reward_model = create_llm_model(model_type="reward_model", config=config.model.reward_model)

ppo_trainer = PPOTrainer(
    actor=actor,
    critic=critic,
    ref_policy=ref_policy,
    reward_model=reward_model,
    config=config.train.ppo,
)

dataset = PromptDataset("examples/tutorial/prompts.jsonl", tokenizer=actor.tokenizer)
dataloader = torch.utils.data.DataLoader(
    dataset,
    batch_size=config.data.batch_size,
    shuffle=True,
    generator=torch.Generator().manual_seed(config.train.seed),
)

history = []
for epoch in range(config.train.num_epochs):
    for step, batch in enumerate(dataloader):
        rollout_outputs = ppo_trainer.rollout(batch["prompt"])
        reward_outputs = ppo_trainer.compute_rewards(rollout_outputs)
        advantage_outputs = ppo_trainer.compute_advantages(reward_outputs)
        loss_dict = ppo_trainer.update(advantage_outputs)

        avg_reward = reward_outputs["rewards"].mean().item()
        print(
            f"Epoch {epoch} | Step {step} | "
            f"Policy Loss: {loss_dict['policy_loss']:.4f} | "
            f"Value Loss: {loss_dict['value_loss']:.4f} | "
            f"KL: {loss_dict['kl'].item():.4f} | "
            f"Avg Reward: {avg_reward:.3f}",
            flush=True,
        )
        history.append({"reward": avg_reward, "kl": loss_dict["kl"].item()})

# What was learned, as a Hugging Face folder, and the two curves.
folder = Path("runs/tutorial/loop")
actor.export(folder / "policy")
(folder / "history.json").write_text(json.dumps(history))
