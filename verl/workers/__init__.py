"""The four roles of PPO: an engine (and a sampler or a reward source) behind registered methods."""
