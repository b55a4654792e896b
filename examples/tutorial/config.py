# examples/tutorial/config.py
from verl.utils.config import get_default_config

config = get_default_config()

# Where the four models start.
config.model.actor.pretrained_path = "runs/tutorial/sft/export"
config.model.ref_policy.pretrained_path = "runs/tutorial/sft/export"
config.model.critic.pretrained_path = "runs/tutorial/rm/export"
config.model.reward_model.pretrained_path = "runs/tutorial/rm/export"

# Train the upper 10 of 30 blocks: enough, and much faster. The critic begins with 0.
config.model.actor.train_layers = 10
config.model.critic.train_layers = 10
config.model.critic.value_head_init = "zero"

# The algorithm.
config.train.ppo.clip_epsilon = 0.2
config.train.ppo.kl_coef = 0.03
config.train.ppo.gamma = 1.0
config.train.ppo.lam = 0.95
config.train.ppo.normalize_reward = True
config.train.ppo.actor_lr = 1e-4
config.train.ppo.critic_lr = 1e-3
config.train.ppo.epochs = 2
config.train.ppo.minibatch_size = 8

# The devices. With one GPU: {"gpu": [0]} for all four.
config.resource.actor = {"cpu": 1}
config.resource.critic = {"cpu": 1}
config.resource.ref_policy = {"cpu": 1}
config.resource.reward_model = {"cpu": 1}

# Batches, lengths in tokens, and how long.
config.data.batch_size = 16
config.data.seq_length = 96
config.data.response_length = 48
config.train.num_epochs = 8
